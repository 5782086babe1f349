#include "tests/engine/support/run_state.h"

#include <gtest/gtest.h>

#include "tests/engine/support/board.h"

namespace ballast::testing {
namespace {

std::vector<std::string> keys_of(const Config& config) {
  switch (config.optimizer.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerType::kLion:
      return {"exp_avg"};
    case OptimizerType::kSgd:
      return config.optimizer.hyper.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                                  : std::vector<std::string>{};
  }
  return {};
}

}  // namespace

RunState state_of(Engine& engine, torch::nn::Module& module, bool compute) {
  const torch::NoGradGuard no_grad;
  RunState state;
  const auto keep = [&state](const std::string& label, const at::Tensor& value) {
    state[label] = value.detach().cpu().clone();
  };
  for (const auto& item : module.named_parameters()) {
    keep("full " + item.key(), engine.full_parameter(item.key()));
    if (compute) keep("seen " + item.key(), item.value().clone());  // clone: an operator, so it faults in
    if (!item.value().requires_grad()) continue;
    keep("step of " + item.key(), engine.full_optimizer_state(item.key(), "step"));
    for (const std::string& key : keys_of(engine.config()))
      keep(key + " of " + item.key(), engine.full_optimizer_state(item.key(), key));
  }
  for (const auto& item : module.named_buffers()) keep("buffer " + item.key(), item.value());
  const Counters counters = engine.counters();
  keep("counters",
       at::tensor(std::vector<std::int64_t>{counters.global_steps, counters.applied_steps, counters.skipped_steps,
                                            counters.micro_steps, counters.global_samples}));
  keep("lr", at::tensor(engine.lr(), at::kDouble));
  keep("loss scale", at::tensor(std::vector<double>{engine.loss_scale()}, at::kDouble));
  return state;
}

void expect_same_state(const RunState& got, const RunState& want, const std::string& what) {
  EXPECT_EQ(got.size(), want.size()) << what;
  for (const auto& [label, value] : want) {
    const auto found = got.find(label);
    const bool same = found != got.end() && bit_equal(found->second, value);
    EXPECT_TRUE(same) << what << ": " << label;
    if (!same && found != got.end() && found->second.sizes() == value.sizes() && value.numel() > 0)
      ADD_FAILURE() << "got " << found->second.flatten()[0].item<double>() << ", want "
                    << value.flatten()[0].item<double>() << " in the first element, off by "
                    << (found->second.to(at::kDouble) - value.to(at::kDouble)).abs().max().item<double>();
  }
}

}  // namespace ballast::testing
