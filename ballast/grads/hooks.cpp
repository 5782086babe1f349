#include "ballast/grads/hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace ballast {
namespace {

class TakeGradient final : public torch::autograd::FunctionPostHook {
 public:
  TakeGradient(at::Tensor parameter, int index, const GradientHooks::Sink& sink)
      : parameter_(std::move(parameter)), index_(index), sink_(sink) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    at::Tensor gradient = std::move(parameter_.mutable_grad());
    parameter_.mutable_grad().reset();
    if (gradient.defined()) sink_(index_, std::move(gradient));
    return outputs;
  }

 private:
  at::Tensor parameter_;
  int index_;
  const GradientHooks::Sink& sink_;  // GradientHooks::Impl outlives its hooks
};

// LibTorch 2.11 and 2.13 use different pointers for the same node.
using AccumulatorPtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

}  // namespace

struct GradientHooks::Impl {
  struct Hook {
    AccumulatorPtr node;  // held: the parameter has only a weak pointer to it, and the hook would die with it
    std::uintptr_t key;
  };
  Sink sink;
  std::vector<Hook> hooks;
};

GradientHooks::GradientHooks(const std::vector<at::Tensor>& parameters, Sink sink) : impl_(std::make_unique<Impl>()) {
  impl_->sink = std::move(sink);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].defined()) continue;
    at::Tensor parameter = parameters[i];
    parameter.mutable_grad().reset();
    AccumulatorPtr node = torch::autograd::impl::grad_accumulator(parameter);
    const std::uintptr_t key =
        node->add_post_hook(std::make_unique<TakeGradient>(parameter, static_cast<int>(i), impl_->sink));
    impl_->hooks.push_back({std::move(node), key});
  }
}

GradientHooks::~GradientHooks() {
  for (Impl::Hook& hook : impl_->hooks) hook.node->del_post_hook(hook.key);
}

}  // namespace ballast
