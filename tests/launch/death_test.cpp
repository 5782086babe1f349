// Ranks that die or hang while an engine trains: every other rank ends by itself, with an error that says where it was
// and which peer it missed.
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>

#include "ballast/engine/engine.h"
#include "tests/launch/support/processes.h"

namespace ballast {
namespace {

using testing::Ended;
using testing::Processes;
using testing::variable;

// ---- the ranks ----

constexpr int kFatalWindow = 1;  // after one window in which everything was met for the first time

void die() {
  const std::string way = variable("WAY");
  if (way == "kill") raise(SIGKILL);
  if (way == "exit") std::exit(3);
  if (way == "hang") {
    while (true) pause();
  }
  throw std::runtime_error("the model broke");
}

struct Net : torch::nn::Module {
  Net() {
    for (int i = 0; i < 4; ++i) blocks->push_back(torch::nn::Linear(32, 32));
    register_module("blocks", blocks);
  }

  /// before: called in forward before a block runs, and in backward before its gradient is computed.
  at::Tensor forward(at::Tensor x, const std::function<void(const char* phase, int block)>& before) {
    for (int i = 0; i < 4; ++i) {
      before("forward", i);
      x = torch::tanh(blocks[i]->as<torch::nn::Linear>()->forward(x));
      x.register_hook([before, i](const at::Tensor&) { before("backward", i); });
    }
    return x.square().mean();
  }

  torch::nn::ModuleList blocks;
};

nlohmann::json settings() {
  return {{"train_micro_batch_size_per_gpu", 1},
          {"managed_gradient_accumulation", false},
          {"steps_per_print", 0},
          {"gradient_clipping", 1.0},
          {"comm_timeout_seconds", std::stod(variable("TIMEOUT"))},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
          {"zero_optimization",
           {{"stage", std::stoi(variable("STAGE"))},
            {"stage3_param_persistence_threshold", 0},
            {"stage3_max_live_parameters", 2500}}}};
}

/// Makes this process die before its n-th operator from here.
void die_at_operator(int n) {
  static int left;
  left = n;
  at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
    if (--left == 0) die();
    return std::unique_ptr<at::ObserverContext>();
  }));
}

const testing::Scenario dying("dying", [] {
  at::set_num_threads(1);
  WorldOptions options;
  options.device = "cpu";
  const World world = World::from_env(options);
  torch::manual_seed(1);
  const auto net = std::make_shared<Net>();
  Engine engine(net, Config::from_json(settings()), world);
  const std::string fatal_phase = variable("PHASE");
  int window = 0;
  const auto before = [&](const std::string& phase, int block) {
    if (world.rank() == 1 && window == kFatalWindow && phase == fatal_phase && block == 2) die();
  };
  for (; window < kFatalWindow + 2; ++window) {
    for (int backward = 0; backward < 2; ++backward) {
      engine.backward(net->forward(torch::ones({1, 32}) * (world.rank() + backward + 1), before));
    }
    if (world.rank() == 1 && window == kFatalWindow && fatal_phase == "step") {
      die_at_operator(std::stoi(variable("OPERATOR")));
    }
    engine.step();
  }
  return 0;
});

// ---- the tests ----

struct Death {
  int stage;
  const char* phase;
  const char* way;
  const char* place;    // what the others miss rank 1 in; which unit depends on how far they gather ahead
  int at_operator = 1;  // in step()
};

void PrintTo(const Death& death, std::ostream* out) {
  *out << "stage" << death.stage << '_' << death.phase;
  if (std::string(death.phase) == "step") *out << "_at_operator" << death.at_operator;
  *out << '_' << death.way;
}

std::string name_of(const ::testing::TestParamInfo<Death>& info) {
  std::ostringstream out;
  PrintTo(info.param, &out);
  return out.str();
}

class DyingRank : public ::testing::TestWithParam<Death> {};

TEST_P(DyingRank, EndsTheOthersWithAnErrorThatNamesItAndThePlace) {
  const Death death = GetParam();
  const std::string way = death.way, phase = death.phase;
  const bool hangs = way == "hang";
  Processes processes("dying");
  processes.start_all(3,
                      {{"STAGE", std::to_string(death.stage)},
                       {"PHASE", phase},
                       {"WAY", way},
                       {"OPERATOR", std::to_string(death.at_operator)},
                       {"TIMEOUT", hangs ? "3" : "600"}});  // longer than the test waits: death is seen, not waited for
  for (const int rank : {0, 2}) {
    const Ended end = processes.join(rank);
    EXPECT_FALSE(end.hung) << "rank " << rank << ": " << end.output;
    EXPECT_EQ(end.exit_code, 1) << "rank " << rank << ": " << end.output;
    EXPECT_NE(end.output.find("rank 1"), std::string::npos) << "rank " << rank << ": " << end.output;
    EXPECT_NE(end.output.find("rank " + std::to_string(rank) + " of 3"), std::string::npos) << end.output;
    EXPECT_NE(end.output.find(death.place), std::string::npos) << "rank " << rank << ": " << end.output;
  }
  if (hangs) return;
  const Ended dead = processes.join(1);
  EXPECT_FALSE(dead.hung) << dead.output;
  EXPECT_EQ(dead.exit_code, way == "kill" ? -SIGKILL : way == "exit" ? 3 : 1) << dead.output;
  if (way == "throw") {
    EXPECT_NE(dead.output.find("the model broke"), std::string::npos) << dead.output;
  }
}

constexpr const char* kGather = "gather of unit blocks.";
constexpr const char* kReduced = "unit blocks.";

INSTANTIATE_TEST_SUITE_P(Launch, DyingRank,
                         ::testing::Values(Death{0, "backward", "kill", "step() after 2 backwards"},
                                           Death{0, "step", "kill", "step() after 2 backwards"},
                                           Death{0, "step", "kill", kReduced, 80},
                                           Death{2, "forward", "kill", "end of backward() number 1"},
                                           Death{2, "backward", "exit", "end of backward() number 1"},
                                           Death{2, "step", "exit", kReduced, 80},  // while updated parameters travel
                                           Death{3, "forward", "kill", kGather}, Death{3, "forward", "exit", kGather},
                                           Death{3, "forward", "throw", kGather}, Death{3, "forward", "hang", kGather},
                                           Death{3, "backward", "kill", kGather},
                                           Death{3, "backward", "throw", kGather},
                                           Death{3, "step", "kill", "step() after 2 backwards"},
                                           Death{3, "step", "kill", "", 40}, Death{3, "step", "exit", "", 60}),
                         name_of);

}  // namespace
}  // namespace ballast
