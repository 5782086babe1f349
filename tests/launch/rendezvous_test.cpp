// Ranks as processes, which find each other by a launcher's variables: this program starts itself again, once a rank,
// and each child plays the scenario that its environment names.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

using Variables = std::map<std::string, std::string>;
constexpr const char* kScenario = "BALLAST_TEST_SCENARIO";
constexpr int kCommErrorStatus = 42;

// ---- children ----

void gather_twice(const World& world) {
  for (const char* purpose : {"first", "second"}) {
    const at::Tensor out = at::empty({world.size()}, at::kLong);
    world.communicator(purpose, at::kCPU)->all_gather(out, at::full({1}, world.rank() + 7, at::kLong), "v").wait();
    if (!at::equal(out, at::arange(7, 7 + world.size(), at::kLong))) std::exit(3);
  }
}

int play(const std::string& scenario) try {
  WorldOptions options = testing::test_options();
  if (scenario == "late") options.timeout = std::chrono::milliseconds(500);
  const World world = World::from_env(options);
  if (std::to_string(world.rank()) != std::getenv("EXPECT_RANK")) return 4;
  if (scenario == "two worlds") gather_twice(World::from_env(options));
  if (scenario == "death") {
    const auto comm = world.communicator("gather", at::kCPU);
    const at::Tensor out = at::empty({2 << 20}, at::kFloat), in = at::zeros({1 << 20}, at::kFloat);
    for (int i = 0; i < 20; ++i) {
      if (world.rank() == 1 && i == 5) raise(SIGKILL);
      comm->all_gather(out, in, "unit blocks.7").wait();
    }
  }
  gather_twice(world);
  return 0;
} catch (const CommError& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return kCommErrorStatus;
}

// ---- parent ----

struct Ended {
  int status;  // as waitpid gives it
  std::string output;
  int exit_code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }
};

class Processes {
 public:
  explicit Processes(std::string scenario) : scenario_(std::move(scenario)) {}

  void start(int rank, Variables variables) {
    variables[kScenario] = scenario_;
    variables["EXPECT_RANK"] = std::to_string(rank);
    std::vector<std::string> environment;
    for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
    for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
    std::vector<char*> pointers;
    for (std::string& entry : environment) pointers.push_back(entry.data());
    pointers.push_back(nullptr);

    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    char* arguments[] = {const_cast<char*>("child"), nullptr};
    Child child;
    ASSERT_EQ(posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, arguments, pointers.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    child.output = ends[0];
    children_.push_back(child);
  }

  std::vector<Ended> join() {
    std::vector<Ended> ended;
    for (const Child& child : children_) {
      Ended end;
      char buffer[4096];
      ssize_t got;
      while ((got = read(child.output, buffer, sizeof buffer)) > 0) end.output.append(buffer, got);
      close(child.output);
      EXPECT_EQ(waitpid(child.pid, &end.status, 0), child.pid);
      ended.push_back(std::move(end));
    }
    children_.clear();
    return ended;
  }

 private:
  struct Child {
    pid_t pid;
    int output;
  };
  std::string scenario_;
  std::vector<Child> children_;
};

/// A TCP port that was free a moment ago, as long as this lives in use by a listener that isn't a rendezvous.
class Listener {
 public:
  Listener() : socket_(socket(AF_INET6, SOCK_STREAM, 0)) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = in6addr_any;
    socklen_t length = sizeof address;
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), length), 0) << std::strerror(errno);
    EXPECT_EQ(listen(socket_, 1), 0);
    getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin6_port);
  }
  ~Listener() { close(socket_); }
  std::string port() const { return std::to_string(port_); }

 private:
  int socket_;
  int port_ = 0;
};

std::string free_port() { return Listener().port(); }

Variables torchrun(int rank, int size, const std::string& port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port}};
}

void expect_all_end_well(Processes& processes) {
  int rank = 0;
  for (const Ended& end : processes.join()) EXPECT_EQ(end.exit_code(), 0) << "rank " << rank++ << ": " << end.output;
}

TEST(Processes, MeetByTorchrunsVariables) {
  for (const char* scenario : {"one world", "two worlds"}) {
    Processes processes(scenario);
    const std::string port = free_port();
    for (const int rank : {2, 0, 1}) processes.start(rank, torchrun(rank, 3, port));
    expect_all_end_well(processes);
  }
}

TEST(Processes, MeetAtTheStoreThatTorchrunsAgentServesAlsoAfterARestart) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  for (const char* attempt : {"0", "1"}) {
    Processes processes("one world");
    for (const int rank : {0, 1}) {
      Variables variables = torchrun(rank, 2, std::to_string(agent->getPort()));
      variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
      variables["TORCHELASTIC_RESTART_COUNT"] = attempt;
      processes.start(rank, variables);
    }
    expect_all_end_well(processes);
  }
}

TEST(Processes, MeetByMpirunsVariables) {
  Processes processes("one world");
  const std::string port = free_port();
  for (const int rank : {0, 1}) {
    processes.start(rank, {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"MASTER_PORT", port}});
  }
  expect_all_end_well(processes);
}

TEST(Processes, MeetBySrunsVariables) {
  Processes processes("one world");
  const std::string port = free_port();
  for (const int rank : {0, 1}) {
    processes.start(rank, {{"SLURM_PROCID", std::to_string(rank)},
                           {"SLURM_STEP_NUM_TASKS", "2"},
                           {"SLURM_LOCALID", std::to_string(rank)},
                           {"SLURM_STEP_NODELIST", "localhost"},
                           {"MASTER_PORT", port}});
  }
  expect_all_end_well(processes);
}

TEST(Processes, ARankThatIsKilledEndsTheOthersWithItsName) {
  Processes processes("death");
  const std::string port = free_port();
  for (const int rank : {0, 1}) processes.start(rank, torchrun(rank, 2, port));
  const std::vector<Ended> ended = processes.join();
  EXPECT_EQ(ended[0].exit_code(), kCommErrorStatus) << ended[0].output;
  EXPECT_NE(ended[0].output.find("[comm.all_gather] unit blocks.7 failed: peer rank 1: "), std::string::npos)
      << ended[0].output;
  EXPECT_EQ(ended[1].exit_code(), -SIGKILL);
}

TEST(Processes, ARankThatWaitsForAnAbsentOneNamesIt) {
  Processes processes("late");
  processes.start(0, torchrun(0, 2, free_port()));
  const Ended end = processes.join()[0];
  EXPECT_EQ(end.exit_code(), kCommErrorStatus);
  EXPECT_NE(end.output.find("(missing: 1; rank 0 of 2, timeout 500 ms"), std::string::npos) << end.output;
}

TEST(Processes, ARankWithoutAServerNamesTheAddress) {
  Processes processes("late");
  const std::string port = free_port();
  processes.start(1, torchrun(1, 2, port));
  const Ended end = processes.join()[0];
  EXPECT_EQ(end.exit_code(), kCommErrorStatus);
  EXPECT_NE(end.output.find("[comm.from_env] can't reach the rendezvous at 127.0.0.1:" + port), std::string::npos)
      << end.output;
}

TEST(Processes, ATakenPortIsNamed) {
  const Listener taken;
  Processes processes("one world");
  processes.start(0, torchrun(0, 2, taken.port()));
  const Ended end = processes.join()[0];
  EXPECT_EQ(end.exit_code(), kCommErrorStatus);
  EXPECT_NE(end.output.find("[comm.from_env] can't serve the rendezvous at 127.0.0.1:" + taken.port()),
            std::string::npos)
      << end.output;
}

}  // namespace

/// Instead of GoogleTest's own: a child plays its scenario.
int run(int argc, char** argv) {
  if (const char* scenario = std::getenv(kScenario)) return play(scenario);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace ballast

int main(int argc, char** argv) { return ballast::run(argc, argv); }
