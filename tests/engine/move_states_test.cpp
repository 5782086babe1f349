// offload_states() and reload_states(): the device's memory for somebody else between phases of training.
#include <torch/torch.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/homes.h"
#include "tests/engine/support/swap_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

using Masters = std::map<std::string, at::Tensor>;
using Kinds = std::vector<StateKind>;
const std::vector<Kinds> kEveryKind{{StateKind::kParameters, StateKind::kGradients, StateKind::kOptimizer},
                                    {StateKind::kParameters},
                                    {StateKind::kGradients},
                                    {StateKind::kOptimizer}};

struct Answer {
  Masters masters;
  std::vector<double> losses;  // of an evaluation in each window
};

nlohmann::json placed(const nlohmann::json& zero) {
  nlohmann::json changes = Zoo::leaf_settings();
  changes.merge_patch({{"zero_optimization", zero}, {"gradient_clipping", 0.5}});
  return changes;
}

// Two backwards a window; between them, and again after the step, the states are taken away and a forward runs.
Answer train(const World& world, const Cell& cell, const nlohmann::json& zero, const Kinds* kinds) {
  Board unused(world.size());
  auto model = std::make_shared<Zoo>();
  Session session(model, settings(cell, 1, placed(zero)), world, unused);
  Engine& engine = session.engine();
  Answer answer;
  const auto phase = [&](int step) {
    if (kinds) engine.offload_states(*kinds);
    const torch::NoGradGuard no_grad;
    answer.losses.push_back(model->loss(sample(step, 9, world.rank(), world.device())).item<double>());
    if (kinds) engine.reload_states();
  };
  for (int step = 0; step < 3; ++step) {
    for (int k = 0; k < 2; ++k) {
      engine.backward(model->loss(sample(step, k, world.rank(), world.device())));
      if (k == 0) phase(step);
    }
    EXPECT_TRUE(engine.step().applied);
    phase(step);
  }
  answer.masters = session.masters();
  return answer;
}

TEST(MoveStates, ComeBackBitForBitInEveryStageAndPlacement) {
  std::vector<Home> places = homes();
  places.push_back({"all on the host", Placement::kAllHost, nlohmann::json::object()});
  for (int size : {1, 2})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16})
      run_ranks(
          size,
          [&](const World& world) {
            for (int stage : {0, 1, 2, 3})
              for (const Home& home : places) {
                if (home.placement == Placement::kAllHost && stage != 3) continue;
                nlohmann::json zero = home.zero;
                if (stage == 3) zero["stage3_param_persistence_threshold"] = 20;  // small units stay gathered
                const Cell cell{stage, home.placement, dtype, false};
                const Answer want = train(world, cell, zero, nullptr);
                for (const Kinds& kinds : kEveryKind) {
                  const Answer got = train(world, cell, zero, &kinds);
                  EXPECT_EQ(got.losses, want.losses) << "stage " << stage << ", " << home.name;
                  for (const auto& [name, value] : got.masters)
                    EXPECT_TRUE(bit_equal(value, want.masters.at(name)))
                        << name << ", stage " << stage << ", " << home.name;
                }
              }
          },
          thread_options());
  expect_nothing_swapped();
}

TEST(MoveStates, LeaveNothingOnTheDevice) {
  run_ranks(
      2,
      [&](const World& world) {
        for (int stage : {0, 1, 2, 3})
          for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            Board unused(world.size());
            auto model = std::make_shared<Zoo>();
            Session session(model, settings({stage, Placement::kDevice, dtype, false}, 1, placed({})), world, unused);
            Engine& engine = session.engine();
            engine.backward(model->loss(sample(0, 0, world.rank(), world.device())));
            const auto now = [&](Tier tier) { return engine.memory().total(tier).now; };
            const std::int64_t before = now(Tier::kDevice);
            EXPECT_EQ(now(Tier::kHost), 0);
            engine.offload_states();
            EXPECT_EQ(now(Tier::kDevice), 0) << "stage " << stage;
            EXPECT_GT(now(Tier::kHost), 0);
            engine.offload_states();  // once is enough
            EXPECT_EQ(now(Tier::kDevice), 0);
            EXPECT_THROW(engine.step(), UseError);
            EXPECT_THROW(engine.full_parameter("aux.weight"), UseError);
            engine.reload_states();
            engine.reload_states();
            EXPECT_EQ(now(Tier::kHost), 0);
            if (stage < 3) {
              EXPECT_EQ(now(Tier::kDevice), before) << "stage " << stage;
            }
            EXPECT_TRUE(engine.step().applied);
          }
      },
      thread_options());
}

// Shards that rest elsewhere leave the device when what is gathered of them does.
TEST(MoveStates, LeaveNothingGatheredWhereverShardsRest) {
  for (const Placement placement : {Placement::kHost, Placement::kAllHost, Placement::kAllNvme})
    for (const int persistent : {0, 40})
      run_ranks(
          2,
          [&](const World& world) {
            Board unused(world.size());
            auto model = std::make_shared<Zoo>();
            const nlohmann::json zero = {{"stage3_param_persistence_threshold", persistent}};
            Session session(model, settings({3, placement, DType::kFloat32, false}, 1, placed(zero)), world, unused);
            Engine& engine = session.engine();
            const auto train = [&](int step) {
              engine.backward(model->loss(sample(step, 0, world.rank(), world.device())));
            };
            train(0);
            EXPECT_TRUE(engine.step().applied);
            train(1);
            EXPECT_GT(engine.memory().cell(MemoryKind::kGathered, Tier::kDevice).now, 0);
            engine.offload_states();
            EXPECT_EQ(engine.memory().total(Tier::kDevice).now, 0) << name_of(placement);
            engine.reload_states();
            EXPECT_TRUE(engine.step().applied);
          },
          thread_options());
  expect_nothing_swapped();
}

TEST(MoveStates, LeaveWhatIsHeldWhereItsPointersAre) {
  for (int stage : {0, 1, 2})
    run_ranks(
        2,
        [&](const World& world) {
          Board unused(world.size());
          auto model = std::make_shared<Zoo>();
          Session session(model, settings({stage, Placement::kDevice, DType::kFloat32, false}, 1, placed({})), world,
                          unused);
          Engine& engine = session.engine();
          at::Tensor held = model->named_parameters()["aux.weight"];
          {
            const auto guard = engine.gathered({held});
            const void* pointer = held.const_data_ptr();
            engine.offload_states();
            EXPECT_EQ(held.const_data_ptr(), pointer);
            engine.reload_states();
            EXPECT_EQ(held.const_data_ptr(), pointer);
          }
          const at::Tensor before = engine.full_parameter("aux.weight").cpu();
          engine.backward(model->loss(sample(0, 0, world.rank(), world.device())));
          EXPECT_TRUE(engine.step().applied);
          const at::Tensor after = engine.full_parameter("aux.weight").cpu();
          EXPECT_TRUE(bit_equal(held.detach().cpu(), after)) << "the update reached the module, stage " << stage;
          EXPECT_FALSE(bit_equal(before, after));
        },
        thread_options());
}

TEST(MoveStates, ModulesComeBackWholeWhenTheEngineEndsMeanwhile) {
  for (int stage : {0, 3})
    run_ranks(
        2,
        [&](const World& world) {
          Board unused(world.size());
          auto model = std::make_shared<Zoo>();
          Masters before;
          for (const auto& item : model->named_parameters()) before[item.key()] = item.value().detach().clone();
          Session session(model, settings({stage, Placement::kDevice, DType::kFloat32, false}, 1, placed({})), world,
                          unused);
          session.engine().offload_states();
          session.engine().shutdown();
          for (const auto& item : model->named_parameters())
            EXPECT_TRUE(at::equal(item.value().cpu(), before.at(item.key()))) << item.key();
        },
        thread_options());
}

}  // namespace
}  // namespace ballast::testing
