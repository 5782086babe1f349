// Ranks whose programs differ at stage 3, where every gather and every backward is collective.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ballast/engine/engine.h"
#include "tests/launch/support/processes.h"

namespace ballast {
namespace {

using testing::Ended;
using testing::Processes;

// ---- the ranks ----

struct Experts : torch::nn::Module {
  Experts() {
    for (int i = 0; i < 2; ++i) experts->push_back(torch::nn::Linear(4, 4));
    register_module("experts", experts);
  }
  at::Tensor loss(int expert) { return experts[expert]->as<torch::nn::Linear>()->forward(torch::ones({1, 4})).sum(); }
  torch::nn::ModuleList experts;
};

struct Rank {
  Rank() : world(World::from_env(options())), model(std::make_shared<Experts>()), engine(model, config(), world) {}

  static WorldOptions options() {
    WorldOptions options;
    options.device = "cpu";
    return options;
  }
  static Config config() {
    return Config::from_json(
        {{"train_micro_batch_size_per_gpu", 1},
         {"managed_gradient_accumulation", false},
         {"steps_per_print", 0},
         {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.01}}}}},
         {"zero_optimization",
          {{"stage", 3}, {"stage3_param_persistence_threshold", 0}, {"stage3_max_live_parameters", 20}}}});
  }

  World world;
  std::shared_ptr<Experts> model;
  Engine engine;
};

const testing::Scenario other_units("other units", [] {
  Rank rank;
  for (const int expert : {0, 1}) rank.engine.backward(rank.model->loss(expert));  // alike, for a start
  rank.engine.step();
  rank.engine.backward(rank.model->loss(rank.world.rank()));
  rank.engine.step();
  return 0;
});

const testing::Scenario other_counts("other counts", [] {
  Rank rank;
  for (int i = 0; i < 2 - rank.world.rank(); ++i) rank.engine.backward(rank.model->loss(0));
  rank.engine.step();
  return 0;
});

// ---- the tests ----

void expect_all_fail_with(Processes& processes, std::initializer_list<const char*> parts) {
  for (const Ended& end : processes.join()) {
    EXPECT_FALSE(end.hung) << end.output;
    EXPECT_EQ(end.exit_code, 1) << end.output;
    for (const char* part : parts)
      EXPECT_NE(end.output.find(part), std::string::npos) << "'" << part << "' in: " << end.output;
  }
}

// DeepSpeed#7998, #8262: ranks that gathered different modules waited for each other for ever.
TEST(Divergence, Case34RanksThatTouchDifferentUnitsEndAndNameBoth) {
  Processes processes("other units");
  processes.start_all(2);
  expect_all_fail_with(processes, {"rank 0: gather of unit experts.0", "rank 1: gather of unit experts.1"});
}

TEST(Divergence, UnequalBackwardsShowTheirCounts) {
  Processes processes("other counts");
  processes.start_all(2);
  expect_all_fail_with(processes, {"rank 0: ", "rank 1: step() after 1 backwards"});
}

}  // namespace
}  // namespace ballast
