// How processes find each other by a launcher's variables, and what they say when they can't.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/world.h"
#include "tests/launch/support/processes.h"

namespace ballast {
namespace {

using testing::Ended;
using testing::Processes;
using testing::torchrun;
using testing::Variables;

// ---- the ranks ----

World meet(std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  WorldOptions options;
  options.device = "cpu";
  options.timeout = timeout;
  World world = World::from_env(options);
  if (std::to_string(world.rank()) != testing::variable("EXPECT_RANK")) std::_Exit(4);
  return world;
}

void gather_twice(const World& world) {
  for (const char* purpose : {"first", "second"}) {
    const at::Tensor out = at::empty({world.size()}, at::kLong);
    world.communicator(purpose, at::kCPU)->all_gather(out, at::full({1}, world.rank() + 7, at::kLong), "v").wait();
    if (!at::equal(out, at::arange(7, 7 + world.size(), at::kLong))) std::_Exit(3);
  }
}

const testing::Scenario one_world("one world", [] {
  gather_twice(meet());
  return 0;
});

const testing::Scenario two_worlds("two worlds", [] {
  const World first = meet(), second = meet();
  gather_twice(second);
  gather_twice(first);
  return 0;
});

// Rank 0, which serves the rendezvous, lets the first world go when its peer has long begun with the second.
const testing::Scenario one_world_after_the_other("one world after the other", [] {
  std::optional<World> world = meet();
  gather_twice(*world);
  if (world->rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  world.reset();
  gather_twice(meet());
  return 0;
});

const testing::Scenario impatient("impatient", [] {
  meet(std::chrono::milliseconds(500));
  return 0;
});

const testing::Scenario killed_in_a_collective("killed in a collective", [] {
  const World world = meet();
  const auto comm = world.communicator("gather", at::kCPU);
  const at::Tensor out = at::empty({2 << 20}, at::kFloat), in = at::zeros({1 << 20}, at::kFloat);
  for (int i = 0; i < 20; ++i) {
    if (world.rank() == 1 && i == 5) raise(SIGKILL);
    comm->all_gather(out, in, "unit blocks.7").wait();
  }
  return 0;
});

// ---- the tests ----

void start(Processes& processes, int rank, Variables variables) {
  variables["EXPECT_RANK"] = std::to_string(rank);
  variables.emplace("RANK", "");  // empty counts as unset; a launcher of these tests may have set it
  variables.emplace("WORLD_SIZE", "");
  processes.start(variables);
}

void expect_all_end_well(Processes& processes) {
  for (const Ended& end : processes.join()) EXPECT_EQ(end.exit_code, 0) << end.output;
}

/// The one child failed with this in its output.
void expect_failure(Processes& processes, const std::string& text) {
  const Ended end = processes.join(0);
  EXPECT_FALSE(end.hung);
  EXPECT_EQ(end.exit_code, 1);
  EXPECT_NE(end.output.find(text), std::string::npos) << "'" << text << "' in: " << end.output;
}

TEST(Rendezvous, ByTorchrunsVariables) {
  for (const char* scenario : {"one world", "two worlds", "one world after the other"}) {
    Processes processes(scenario);
    const std::string port = testing::free_port();
    for (const int rank : {2, 0, 1}) start(processes, rank, torchrun(rank, 3, port));
    expect_all_end_well(processes);
  }
}

TEST(Rendezvous, AtTheStoreThatTorchrunsAgentServesAlsoAfterARestart) {
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
      start(processes, rank, variables);
    }
    expect_all_end_well(processes);
  }
}

TEST(Rendezvous, ByMpirunsVariables) {
  Processes processes("one world");
  const std::string port = testing::free_port();
  for (const int rank : {0, 1}) {
    start(processes, rank,
          {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
           {"OMPI_COMM_WORLD_SIZE", "2"},
           {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
           {"MASTER_PORT", port}});
  }
  expect_all_end_well(processes);
}

TEST(Rendezvous, BySrunsVariables) {
  Processes processes("one world");
  const std::string port = testing::free_port();
  for (const int rank : {0, 1}) {
    start(processes, rank,
          {{"SLURM_PROCID", std::to_string(rank)},
           {"SLURM_STEP_NUM_TASKS", "2"},
           {"SLURM_LOCALID", std::to_string(rank)},
           {"SLURM_STEP_NODELIST", "localhost"},
           {"MASTER_PORT", port}});
  }
  expect_all_end_well(processes);
}

TEST(Rendezvous, AnAbsentRankIsNamed) {
  Processes processes("impatient");
  start(processes, 0, torchrun(0, 2, testing::free_port()));
  expect_failure(processes,
                 "[comm.join] not all ranks came to the rendezvous (missing: 1; rank 0 of 2, timeout 500 ms");
}

TEST(Rendezvous, AnAbsentServerIsNamedByItsAddress) {
  Processes processes("impatient");
  const std::string port = testing::free_port();
  start(processes, 1, torchrun(1, 2, port));
  expect_failure(processes, "[comm.from_env] can't reach the rendezvous at 127.0.0.1:" + port);
}

TEST(Rendezvous, ATakenPortIsNamed) {
  const testing::Listener taken;
  Processes processes("one world");
  start(processes, 0, torchrun(0, 2, taken.port()));
  expect_failure(processes, "[comm.from_env] can't serve the rendezvous at 127.0.0.1:" + taken.port());
}

TEST(Rendezvous, ARankThatIsKilledInACollectiveIsNamedByTheOther) {
  Processes processes("killed in a collective");
  const std::string port = testing::free_port();
  for (const int rank : {0, 1}) start(processes, rank, torchrun(rank, 2, port));
  expect_failure(processes, "[comm.all_gather] unit blocks.7 failed: peer rank 1: ");
  EXPECT_EQ(processes.join(1).exit_code, -SIGKILL);
}

}  // namespace
}  // namespace ballast
