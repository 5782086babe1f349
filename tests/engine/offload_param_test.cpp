// Parameters that rest in host memory or on disk at stage 3, and fault in from there, in every placement of the
// optimizer's states.
#include <torch/torch.h>

#include "ballast/comm/testing.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/homes.h"
#include "tests/engine/support/swap_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

using Masters = std::map<std::string, at::Tensor>;

Masters train(const World& world, const Cell& cell, const nlohmann::json& zero, bool evaluate) {
  Board unused(world.size());
  auto model = std::make_shared<Zoo>();
  nlohmann::json changes = Zoo::leaf_settings();
  changes.merge_patch({{"zero_optimization", zero}, {"gradient_clipping", 0.5}});
  Session session(model, settings(cell, 1, changes), world, unused);
  for (int step = 0; step < 4; ++step) {
    for (int k = 0; k <= step % 2; ++k)
      session.engine().backward(model->loss(sample(step, k, world.rank(), world.device())));
    EXPECT_TRUE(session.engine().step().applied);
    if (!evaluate) continue;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(std::isfinite(model->loss(sample(step, 7, world.rank(), world.device())).item<double>()));
  }
  return session.masters();
}

class OffloadParamIn : public ::testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(OffloadParamIn, HasTheBitsOfParametersOnTheDevice) {
  const auto& [size, dtype] = GetParam();
  const auto on_disk = [](int buffers, std::int64_t max_in_cpu) -> nlohmann::json {
    return {{"device", "nvme"},
            {"nvme_path", swap_folder().string()},
            {"buffer_count", buffers},
            {"max_in_cpu", max_in_cpu}};
  };
  const std::vector<nlohmann::json> places{{{"device", "cpu"}}, on_disk(2, 0), on_disk(5, 100)};
  run_ranks(
      size,
      [&, dtype = dtype](const World& world) {
        for (const Home& home : homes()) {
          const Cell cell{3, home.placement, dtype, false};
          nlohmann::json zero = home.zero;
          zero["offload_param"] = {{"device", "none"}};
          const Masters want = train(world, cell, zero, false);
          for (const nlohmann::json& param : places)
            for (std::int64_t live : {1, 300, 1'000'000'000}) {
              zero["offload_param"] = param;
              zero["stage3_max_live_parameters"] = live;
              for (bool evaluate : {false, true})
                for (const auto& [name, value] : train(world, cell, zero, evaluate))
                  EXPECT_TRUE(bit_equal(value, want.at(name)))
                      << name << ", " << home.name << ", " << param << ", live " << live;
            }
        }
      },
      thread_options());
  expect_nothing_swapped();
}

INSTANTIATE_TEST_SUITE_P(Worlds, OffloadParamIn,
                         ::testing::Combine(::testing::Values(1, 2),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16)),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) + "_" + name_of(std::get<1>(info.param));
                         });

TEST(OffloadParam, ShardsCountAsHostMemoryAndTheModuleComesBackWhole) {
  run_ranks(
      1,
      [&](const World& world) {
        auto model = std::make_shared<torch::nn::Linear>(64, 64)->ptr();
        const at::Tensor before = model->parameters()[0].detach().clone();
        const auto config = Config::from_json(
            {{"train_micro_batch_size_per_gpu", 1},
             {"bf16", {{"enabled", true}}},
             {"zero_optimization",
              {{"stage", 3}, {"stage3_param_persistence_threshold", 0}, {"offload_param", {{"device", "cpu"}}}}}});
        Engine engine(model, config, world);
        EXPECT_EQ(engine.memory().cell(MemoryKind::kParams, Tier::kDevice).now, 0);
        EXPECT_EQ(engine.memory().cell(MemoryKind::kParams, Tier::kHost).now, 2 * (64 * 64 + 64));
        EXPECT_EQ(engine.memory().cell(MemoryKind::kGathered, Tier::kDevice).now, 0);
        engine.shutdown();
        EXPECT_TRUE(at::equal(model->parameters()[0].cpu(), before.to(at::kBFloat16)));
      },
      thread_options());
}

}  // namespace
}  // namespace ballast::testing
