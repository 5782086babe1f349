// The update rules on the two kinds of memory. Formulas and their sources stand in kernels/kernels.h.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ballast/base/trace.h"
#include "ballast/grads/arithmetic.h"
#include "ballast/kernels/kernels.h"
#include "ballast/optim/optimizer_states.h"

namespace ballast {
namespace {

at::Tensor part_of(const at::Tensor& tensor, Range range) {
  return tensor.defined() ? tensor.narrow(0, range.begin, range.size()) : tensor;
}

float* data_or_null(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

}  // namespace

void OptimizerStates::run(const Update& update, const at::Tensor& parameters) {
  UnitStates& mine = at(update.unit);
  if (mine.tier != Tier::kDevice) {
    for_chunks(update.unit, StateChunks::Access::kChange,
               [&](float* master, std::int64_t, Range range) { run_chunk(update, range, master, parameters); });
    return;
  }
  for (const Segment& segment : update.segments)
    update.sum.read(segment.range, [&](const at::Tensor& grad) {
      const at::Tensor out = mine.master_is_bound ? at::Tensor() : part_of(parameters, segment.range);
      if (!device_.is_cpu()) {
        run_on_device(update, segment, grad);
        if (!out.defined()) return;
        // A copy that has to round does so on the host, in memory of its own; so what crosses the bus is rounded
        // before.
        const at::Tensor updated = part_of(mine.master, segment.range);
        out.copy_(out.is_cpu() ? updated.to(out.scalar_type()) : updated);
        return;
      }
      const at::Tensor master = part_of(mine.master, segment.range), first = part_of(mine.first, segment.range),
                       second = part_of(mine.second, segment.range);
      run_on_host(update, segment,
                  {data_or_null(master), data_or_null(first), data_or_null(second), grad, out, segment.range.size()});
    });
}

// The kernels write the rounded copy where the parameters are, or next to it where they are across a bus.
void OptimizerStates::run_chunk(const Update& update, Range range, float* master, const at::Tensor& parameters) {
  const int moments = OptimizerStates::moments(config_);
  const std::string& name = layout_.units[static_cast<std::size_t>(update.unit)].name;
  for (const Segment& segment : update.segments) {
    const Range part = intersect(segment.range, range);
    if (part.empty()) continue;
    float* weights = master + (part.begin - range.begin);
    const at::Tensor to = part_of(parameters, part);
    const at::Tensor staged = uploads_->stage(to, name);
    update.sum.read(part, [&](const at::Tensor& grad) {
      const trace::Span work(trace::Lane::kHostUpdate, "update", name);
      run_on_host(update, segment,
                  {weights, moments > 0 ? weights + range.size() : nullptr,
                   moments > 1 ? weights + 2 * range.size() : nullptr, grad.cpu(), staged, part.size()});
    });
    uploads_->send(staged, to, name);
  }
}

void OptimizerStates::run_on_host(const Update& update, const Segment& segment, const Pass& pass) {
  kernels::UpdateView view{};
  view.master = pass.master;
  view.first = pass.first;
  view.second = pass.second;
  view.grad = pass.grad.const_data_ptr();
  view.grad_type = scalar_of(pass.grad);
  view.out = pass.out.defined() ? pass.out.mutable_data_ptr() : nullptr;
  view.out_type = pass.out.defined() ? scalar_of(pass.out) : kernels::Scalar::kFloat32;
  view.n = pass.n;

  const OptimizerHyper& h = hyper(segment.group);
  const double lr = update.lr[static_cast<std::size_t>(segment.group)];
  const int threads = lane_ != nullptr ? lane_->threads() : at::get_num_threads();
  switch (config_.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      kernels::adam_update({lr, h.beta1, h.beta2, h.eps, h.weight_decay, config_.type == OptimizerType::kAdamW,
                            segment.step, update.grad_factor},
                           view, threads);
      break;
    case OptimizerType::kSgd:
      if (h.momentum == 0) view.first = nullptr;
      kernels::sgd_update({lr, h.momentum, h.dampening, h.weight_decay, h.nesterov, segment.fresh, update.grad_factor},
                          view, threads);
      break;
    case OptimizerType::kLion:
      kernels::lion_update({lr, h.beta1, h.beta2, h.weight_decay, update.grad_factor}, view, threads);
      break;
  }
}

void OptimizerStates::run_on_device(const Update& update, const Segment& segment, at::Tensor grad) {
  UnitStates& unit = at(update.unit);
  const at::Tensor master = part_of(unit.master, segment.range);
  const at::Tensor first = part_of(unit.first, segment.range);
  const at::Tensor second = part_of(unit.second, segment.range);
  grad = grad.to(at::kFloat);
  if (update.grad_factor != 1) grad.mul_(update.grad_factor);  // the sum is not needed afterwards

  const OptimizerHyper& h = hyper(segment.group);
  const double lr = update.lr[static_cast<std::size_t>(segment.group)];
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
      // Every product is rounded before it is added, as on the host: a fused add_(x, alpha) would have other bits.
      if (h.weight_decay != 0) grad = master * h.weight_decay + grad;
      if (h.momentum != 0) {
        if (segment.fresh) {
          first.copy_(grad);
        } else {
          first.mul_(h.momentum).add_(h.dampening == 0 ? grad : grad * (1 - h.dampening));
        }
        grad = h.nesterov ? grad + first * h.momentum : first;
      }
      master.sub_(grad * lr);
      break;
    }
    case OptimizerType::kLion: {
      const at::Tensor direction = (first * h.beta1).add_(grad, 1 - h.beta1).sign_();
      master.mul_(1 - lr * h.weight_decay).add_(direction, -lr);
      first.mul_(h.beta2).add_(grad, 1 - h.beta2);
      break;
    }
  }
}

}  // namespace ballast
