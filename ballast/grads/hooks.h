#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace ballast {

/// Hooks on the gradient accumulators of parameters. When autograd has accumulated a parameter's gradient, the hook
/// takes it out of param.grad and hands it over, on the thread that runs that part of the backward (the caller's on
/// CPU, the device's autograd thread on CUDA, while the caller waits).
class GradientHooks {
 public:
  using Sink = std::function<void(int parameter, at::Tensor gradient)>;

  /// parameters: leaves that require grad, undefined where there is nothing to hook; index is what the sink gets. Their
  /// .grad is dropped.
  GradientHooks(const std::vector<at::Tensor>& parameters, Sink sink);
  ~GradientHooks();  // removes them; others' hooks stay
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast
