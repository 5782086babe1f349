#include "tests/launch/support/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace ballast::testing {
namespace {

constexpr const char* kScenario = "BALLAST_TEST_SCENARIO";
constexpr std::chrono::seconds kLimit(120);  // of a child's life; timeouts in scenarios are shorter

std::map<std::string, int (*)()>& scenarios() {
  static std::map<std::string, int (*)()> known;
  return known;
}

int play(const std::string& name) {
  try {
    return scenarios().at(name)();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %s: %s\n", variable("RANK").c_str(), error.what());
    return 1;
  }
}

/// Appends what comes until the other end is closed; false if that takes too long.
bool read_all(int descriptor, std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd ready{descriptor, POLLIN, 0};
    if (left.count() <= 0 || poll(&ready, 1, static_cast<int>(left.count())) == 0) return false;
    char buffer[4096];
    const ssize_t got = read(descriptor, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return true;
    text.append(buffer, static_cast<std::size_t>(got));
  }
}

}  // namespace

Processes::Processes(std::string scenario) : scenario_(std::move(scenario)) {}

Processes::~Processes() {
  for (const Child& child : children_) {
    if (child.joined) continue;
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
    close(child.error_output);
  }
}

void Processes::start(const Variables& variables) {
  std::vector<std::string> environment{std::string(kScenario) + "=" + scenario_};
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
  std::vector<char*> pointers;
  for (std::string& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);

  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error(std::string("pipe2: ") + std::strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  char name[] = "rank";
  char* arguments[] = {name, nullptr};
  Child child{0, ends[0]};
  const int refused = posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, arguments, pointers.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (refused != 0) throw std::runtime_error(std::string("posix_spawn: ") + std::strerror(refused));
  children_.push_back(child);
}

void Processes::start_all(int size, const Variables& variables) {
  const std::string port = free_port();
  for (int rank = 0; rank < size; ++rank) {
    Variables all = torchrun(rank, size, port);
    all.insert(variables.begin(), variables.end());
    start(all);
  }
}

Ended Processes::join(int index) {
  Child& child = children_.at(static_cast<std::size_t>(index));
  Ended ended;
  ended.hung = !read_all(child.error_output, ended.output);
  if (ended.hung) kill(child.pid, SIGKILL);
  close(child.error_output);
  int status = 0;
  waitpid(child.pid, &status, 0);
  ended.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  child.joined = true;
  return ended;
}

std::vector<Ended> Processes::join() {
  std::vector<Ended> ended;
  for (std::size_t index = 0; index < children_.size(); ++index) ended.push_back(join(static_cast<int>(index)));
  return ended;
}

Variables torchrun(int rank, int size, const std::string& port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port}};
}

Listener::Listener() : socket_(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_any;
  if (bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || listen(socket_, 1) != 0)
    throw std::runtime_error(std::string("no port to listen on: ") + std::strerror(errno));
}

Listener::~Listener() { close(socket_); }

std::string Listener::port() const {
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
  return std::to_string(ntohs(address.sin6_port));
}

std::string free_port() { return Listener().port(); }

Scenario::Scenario(const char* name, int (*play)()) { scenarios().emplace(name, play); }

std::string variable(const char* name) {
  if (const char* value = std::getenv(name)) return value;
  std::fprintf(stderr, "the scenario needs the variable %s\n", name);
  std::_Exit(99);
}

}  // namespace ballast::testing

/// In place of GoogleTest's own: a child plays its scenario.
int main(int argc, char** argv) {
  if (const char* scenario = std::getenv(ballast::testing::kScenario)) return ballast::testing::play(scenario);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
