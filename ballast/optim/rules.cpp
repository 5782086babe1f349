// The update rules on the two kinds of memory. Formulas and their sources stand in kernels/kernels.h.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ballast/grads/arithmetic.h"
#include "ballast/kernels/kernels.h"
#include "ballast/optim/optimizer_states.h"

namespace ballast {
namespace {

float* data_or_null(const at::Tensor& tensor, std::int64_t offset) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() + offset : nullptr;
}

at::Tensor part_of(const at::Tensor& tensor, Range range) {
  return tensor.defined() ? tensor.narrow(0, range.begin, range.size()) : tensor;
}

}  // namespace

void OptimizerStates::update_on_host(UnitStates& unit, const at::Tensor& sum, const Segment& segment,
                                     const UpdateStep& step) {
  const Range range = segment.range;
  const at::Tensor grad = part_of(sum, range);
  // The kernel writes the rounded copy where the parameters are, or next to it where they are across a bus.
  at::Tensor out;
  if (!unit.master_is_bound) {
    out = part_of(unit.bound, range);
    if (!out.is_cpu())
      out = at::empty({range.size()}, out.options().device(at::kCPU).pinned_memory(policy_.pin_memory));
  }
  kernels::UpdateView view{};
  view.master = data_or_null(unit.master, range.begin);
  view.first = data_or_null(unit.first, range.begin);
  view.second = data_or_null(unit.second, range.begin);
  view.grad = grad.const_data_ptr();
  view.grad_type = scalar_of(grad);
  view.out = out.defined() ? out.mutable_data_ptr() : nullptr;
  view.out_type = out.defined() ? scalar_of(out) : kernels::Scalar::kFloat32;
  view.n = range.size();

  const OptimizerHyper& h = hyper(segment.group);
  const double lr = step.lr[static_cast<std::size_t>(segment.group)];
  const int threads = at::get_num_threads();
  switch (config_.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      kernels::adam_update({lr, h.beta1, h.beta2, h.eps, h.weight_decay, config_.type == OptimizerType::kAdamW,
                            segment.step, step.grad_factor},
                           view, threads);
      break;
    case OptimizerType::kSgd:
      if (h.momentum == 0) view.first = nullptr;
      kernels::sgd_update({lr, h.momentum, h.dampening, h.weight_decay, h.nesterov, segment.fresh, step.grad_factor},
                          view, threads);
      break;
    case OptimizerType::kLion:
      kernels::lion_update({lr, h.beta1, h.beta2, h.weight_decay, step.grad_factor}, view, threads);
      break;
  }
  if (out.defined() && !unit.bound.is_cpu()) part_of(unit.bound, range).copy_(out);
}

void OptimizerStates::update_on_device(UnitStates& unit, const at::Tensor& sum, const Segment& segment,
                                       const UpdateStep& step) {
  const at::Tensor master = part_of(unit.master, segment.range);
  const at::Tensor first = part_of(unit.first, segment.range);
  const at::Tensor second = part_of(unit.second, segment.range);
  at::Tensor grad = part_of(sum, segment.range).to(at::kFloat);
  if (step.grad_factor != 1) grad.mul_(step.grad_factor);

  const OptimizerHyper& h = hyper(segment.group);
  const double lr = step.lr[static_cast<std::size_t>(segment.group)];
  switch (config_.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW: {
      const at::Tensor count = at::full({}, static_cast<double>(segment.step), grad.options());
      if (config_.type == OptimizerType::kAdamW) {
        at::_fused_adamw_({master}, {grad}, {first}, {second}, {}, {count}, lr, h.beta1, h.beta2, h.weight_decay, h.eps,
                          false, false);
      } else {
        at::_fused_adam_({master}, {grad}, {first}, {second}, {}, {count}, lr, h.beta1, h.beta2, h.weight_decay, h.eps,
                         false, false);
      }
      break;
    }
    case OptimizerType::kSgd: {
      if (h.weight_decay != 0) grad.add_(master, h.weight_decay);
      if (h.momentum != 0) {
        if (segment.fresh) {
          first.copy_(grad);
        } else {
          first.mul_(h.momentum).add_(grad, 1 - h.dampening);
        }
        grad = h.nesterov ? grad.add_(first, h.momentum) : first;
      }
      master.add_(grad, -lr);
      break;
    }
    case OptimizerType::kLion: {
      const at::Tensor direction = (first * h.beta1).add_(grad, 1 - h.beta1).sign_();
      master.mul_(1 - lr * h.weight_decay).add_(direction, -lr);
      first.mul_(h.beta2).add_(grad, 1 - h.beta2);
      break;
    }
  }
  if (!unit.master_is_bound) part_of(unit.bound, segment.range).copy_(master);
}

}  // namespace ballast
