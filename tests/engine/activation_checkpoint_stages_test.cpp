// Activation checkpointing inside an engine, where backward's second call of a block gathers parameters again.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <string>

#include "ballast/comm/testing.h"
#include "ballast/engine/activation_checkpoint.h"
#include "ballast/engine/engine.h"

namespace ballast {
namespace {

using testing::run_ranks;

/// A frozen layer in bf16 with a low-rank adapter in fp32 beside it.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    base = register_module("base", torch::nn::Linear(16, 16));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(16, 3).bias(false)));
    up = register_module("up", torch::nn::Linear(torch::nn::LinearOptions(3, 16).bias(false)));
    base->to(torch::kBFloat16);
    for (at::Tensor& parameter : base->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(base(x.to(torch::kBFloat16)).to(torch::kFloat) + up(down(x)));
  }
  torch::nn::Linear base{nullptr}, down{nullptr}, up{nullptr};
};
TORCH_MODULE(Adapted);

enum class Way { kPlain, kCheckpointed, kNested };

struct Net : torch::nn::Module {
  explicit Net(Way way) : way(way) {
    torch::manual_seed(5);
    for (int i = 0; i < 4; ++i) blocks->push_back(Adapted());
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    const auto call = [this](int i, const at::Tensor& in) { return blocks[i]->as<Adapted>()->forward(in); };
    const auto one = [call](int i, const at::Tensor& in) {
      return checkpoint([call, i](const at::Tensor& y) { return call(i, y); }, in);
    };
    for (int i = 0; i < 4; i += 2) {
      if (way == Way::kPlain) x = call(i + 1, call(i, x));
      if (way == Way::kCheckpointed) x = one(i + 1, one(i, x));
      if (way == Way::kNested) {
        x = checkpoint([one, i](const at::Tensor& in) { return one(i + 1, one(i, in)); }, x);
      }
    }
    return x.square().mean();
  }
  const Way way;
  torch::nn::ModuleList blocks;
};

/// All parameters after three steps on two ranks, by name; as rank 0 has them.
std::map<std::string, at::Tensor> train(Way way, int stage) {
  std::map<std::string, at::Tensor> trained;
  run_ranks(2, [&](const World& world) {
    std::shared_ptr<Net> net;
    static std::mutex one_at_a_time;  // the seed is the process's
    {
      std::lock_guard lock(one_at_a_time);
      net = std::make_shared<Net>(way);
    }
    {
      Engine engine(
          net,
          Config::from_json(
              {{"train_micro_batch_size_per_gpu", 1},
               {"managed_gradient_accumulation", false},
               {"steps_per_print", 0},
               {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.05}}}}},
               {"zero_optimization",
                {{"stage", stage}, {"stage3_param_persistence_threshold", 0}, {"stage3_max_live_parameters", 400}}}}),
          world);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = torch::sin(torch::arange(32, torch::kFloat) * (step + 2 * world.rank() + 1))
                                 .view({2, 16})
                                 .to(world.device());
        engine.backward(net->forward(x));
        EXPECT_TRUE(engine.step().applied);
      }
    }
    if (world.rank() != 0) return;
    for (const auto& item : net->named_parameters()) trained[item.key()] = item.value().detach().cpu().clone();
  });
  return trained;
}

// DeepSpeed#8148, #7462: wrong gradients, and dtypes lost, with checkpointing over frozen half-precision weights.
TEST(ActivationCheckpoint, Case33HasTheBitsOfAPlainRunAtEveryStageAndKeepsDtypes) {
  const auto initial = Net(Way::kPlain).named_parameters();
  const auto want = train(Way::kPlain, 0);
  for (const int stage : {0, 1, 2, 3}) {
    for (const Way way : {Way::kPlain, Way::kCheckpointed, Way::kNested}) {
      const auto got = train(way, stage);
      ASSERT_EQ(got.size(), want.size());
      for (const auto& [name, value] : got) {
        const bool frozen = name.find("base") != std::string::npos;
        EXPECT_EQ(value.scalar_type(), frozen ? torch::kBFloat16 : torch::kFloat) << name;
        EXPECT_TRUE(at::equal(value, want.at(name)))
            << name << ", stage " << stage << ", way " << static_cast<int>(way);
        EXPECT_EQ(at::equal(value, initial[name]), frozen) << name << ", stage " << stage;
      }
    }
  }
}

}  // namespace
}  // namespace ballast
