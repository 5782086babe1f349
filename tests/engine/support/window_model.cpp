#include "tests/engine/support/window_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace ballast::testing {

void WindowModel::backward(int rank, const Tensors& gradients, const BackwardOptions& options) {
  weighted_ = options.weight.has_value();
  summed_ = !options.scale_wrt_gas;
  weight_ += options.weight.value_or(0);
  for (const auto& [name, gradient] : gradients) {
    const at::Tensor contribution = gradient * options.weight.value_or(1);
    const auto [entry, first] = sums_.try_emplace(name, contribution);
    if (!first) entry->second = entry->second + contribution;
  }
  ++backwards_[static_cast<std::size_t>(rank)];
  new_backward_ = true;
}

bool WindowModel::any_backward() const {
  return std::any_of(backwards_.begin(), backwards_.end(), [](std::int64_t n) { return n > 0; });
}

bool WindowModel::boundary() const {
  return !rules_.managed || boundary_.value_or(micro_batches_ + 1 >= rules_.accumulation_steps);
}

double WindowModel::normaliser() const {
  if (weighted_) return weight_;
  if (summed_) return rules_.world;
  return static_cast<double>(rules_.world) *
         static_cast<double>(rules_.managed ? micro_batches_ : rules_.accumulation_steps);
}

double WindowModel::gradient_divisor() const {
  if (weighted_ || summed_) return normaliser();
  return static_cast<double>(rules_.world) * static_cast<double>(rules_.accumulation_steps);
}

at::Tensor WindowModel::sum(const std::string& name) const {
  const auto entry = sums_.find(name);
  return entry == sums_.end() ? at::Tensor() : entry->second;
}

StepReport WindowModel::step() {
  const std::int64_t most_backwards = *std::max_element(backwards_.begin(), backwards_.end());
  if (new_backward_ && rules_.managed) ++micro_batches_;
  counters_.micro_steps += rules_.managed ? new_backward_ : most_backwards;
  new_backward_ = false;

  StepReport report;
  report.micro_batches = rules_.managed ? micro_batches_ : most_backwards;
  report.weight = weight_;
  if (!any_backward()) return report;  // kEmptyWindow
  if (rules_.managed && !boundary_.value_or(micro_batches_ >= rules_.accumulation_steps)) {
    report.reason = StepReason::kMidWindow;
    return report;
  }
  if (normaliser() == 0) {  // all weights 0: nothing to learn from
    clear();
    return report;
  }
  report = apply(report);
  ++counters_.global_steps;
  ++(report.applied ? counters_.applied_steps : counters_.skipped_steps);
  counters_.global_samples += rules_.world * rules_.accumulation_steps;
  clear();
  return report;
}

StepReport WindowModel::apply(StepReport report) {
  double squares = 0;
  for (auto& [name, sum] : sums_) {
    sum = sum / normaliser();
    squares += sum.square().sum().item<double>();
  }
  report.reason = std::isfinite(squares) ? StepReason::kApplied : StepReason::kNonFinite;
  report.applied = report.reason == StepReason::kApplied;
  report.grad_norm = std::sqrt(squares);
  if (!report.applied) return report;
  if (rules_.clip > 0 && report.grad_norm > rules_.clip) report.clip_factor = rules_.clip / (report.grad_norm + 1e-6);
  for (const auto& [name, sum] : sums_) adam_.update(name, values_.at(name), sum * report.clip_factor);
  return report;
}

void WindowModel::clear() {
  sums_.clear();
  std::fill(backwards_.begin(), backwards_.end(), 0);
  micro_batches_ = 0;
  new_backward_ = weighted_ = summed_ = false;
  weight_ = 0;
}

}  // namespace ballast::testing
