#include "ballast/grads/hooks.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

namespace ballast {
namespace {

struct Arrived {
  std::map<int, std::vector<at::Tensor>> gradients;
  GradientHooks::Sink sink() {
    return [this](int parameter, at::Tensor gradient) { gradients[parameter].push_back(std::move(gradient)); };
  }
};

at::Tensor leaf(double value) { return at::full({3}, value, at::kFloat).requires_grad_(true); }

TEST(GradientHooks, TakeEachGradientOnceABackward) {
  const at::Tensor a = leaf(1), b = leaf(2), unused = leaf(3);
  a.mutable_grad() = at::ones({3});  // of an earlier life: dropped
  Arrived arrived;
  const GradientHooks hooks({a, at::Tensor(), b, unused}, arrived.sink());
  EXPECT_FALSE(a.grad().defined());
  (a * 2 + a * 3 + b * a).sum().backward();  // a three times
  ASSERT_EQ(arrived.gradients.size(), 2U);
  ASSERT_EQ(arrived.gradients[0].size(), 1U);
  EXPECT_TRUE(at::equal(arrived.gradients[0][0], at::full({3}, 7, at::kFloat)));
  EXPECT_TRUE(at::equal(arrived.gradients[2][0], at::ones({3})));
  EXPECT_FALSE(a.grad().defined()) << "it is in one place only";
  (a * 2).sum().backward();
  EXPECT_EQ(arrived.gradients[0].size(), 2U);
  EXPECT_TRUE(at::equal(arrived.gradients[0][1], at::full({3}, 2, at::kFloat))) << "not added to the one before";
}

TEST(GradientHooks, LeaveTheParameterWhenTheyEnd) {
  const at::Tensor a = leaf(1);
  Arrived arrived;
  {
    const GradientHooks hooks({a}, arrived.sink());
    (a * 2).sum().backward();
  }
  (a * 3).sum().backward();
  EXPECT_EQ(arrived.gradients[0].size(), 1U);
  EXPECT_TRUE(at::equal(a.grad(), at::full({3}, 3, at::kFloat)));
}

/// Counts its calls.
struct OthersHook final : torch::autograd::FunctionPostHook {
  explicit OthersHook(int& calls) : calls(calls) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++calls;
    return outputs;
  }
  int& calls;
};

TEST(GradientHooks, LeaveOthersHooksAlone) {
  const at::Tensor a = leaf(1);
  int calls = 0;
  const auto node = torch::autograd::impl::grad_accumulator(a);
  node->add_post_hook(std::make_unique<OthersHook>(calls));
  Arrived arrived;
  {
    const GradientHooks hooks({a}, arrived.sink());
    (a * 2).sum().backward();
    EXPECT_EQ(calls, 1);
  }
  (a * 2).sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(arrived.gradients[0].size(), 1U);
}

TEST(GradientHooks, PassOnWhatTheSinkThrows) {
  const at::Tensor a = leaf(1);
  const GradientHooks hooks({a}, [](int, at::Tensor) { throw std::runtime_error("refused"); });
  try {
    (a * 2).sum().backward();
    ADD_FAILURE() << "the error vanished";
  } catch (const std::exception& e) {
    EXPECT_NE(std::string(e.what()).find("refused"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ballast
