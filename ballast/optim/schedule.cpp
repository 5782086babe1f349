#include "ballast/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ballast {

Schedule::Schedule(const SchedulerConfig& scheduler, const OptimizerConfig& optimizer)
    : scheduler_(scheduler), warmup_(std::max<std::int64_t>(2, scheduler.warmup_num_steps)) {
  group_lr_.push_back(optimizer.hyper.lr);
  for (const OptimizerGroup& group : optimizer.groups) group_lr_.push_back(group.hyper.lr);
}

double Schedule::rise(std::int64_t iteration) const {
  if (scheduler_.warmup_type == WarmupType::kLinear) {
    return static_cast<double>(iteration) / static_cast<double>(warmup_);
  }
  // The reciprocal first, as DeepSpeed computes it: the same bits.
  return 1.0 / std::log(static_cast<double>(warmup_)) * std::log(static_cast<double>(iteration + 1));
}

double Schedule::gamma(std::int64_t iteration) const {
  if (iteration < 0) return 0;
  if (iteration < warmup_) return rise(iteration);
  if (scheduler_.type == SchedulerType::kWarmupLr) return 1;
  const std::int64_t total = scheduler_.total_num_steps;
  return std::max(0.0, static_cast<double>(total - iteration) / std::max(1.0, static_cast<double>(total - warmup_)));
}

double Schedule::ratio(std::int64_t iteration) const {
  if (iteration < 0) return 0;
  if (iteration < warmup_) return scheduler_.warmup_min_ratio + rise(iteration) * (1 - scheduler_.warmup_min_ratio);
  const auto past = static_cast<double>(iteration - warmup_ + 1);
  const double progress =
      std::min(1.0, past / static_cast<double>(std::max<std::int64_t>(1, scheduler_.total_num_steps - warmup_)));
  const double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return std::max(0.0, scheduler_.cos_min_ratio + (1 - scheduler_.cos_min_ratio) * cosine);
}

std::vector<double> Schedule::lr(std::int64_t applied_steps) const {
  const std::int64_t iteration = scheduler_.last_batch_iteration + applied_steps;
  std::vector<double> rates = group_lr_;
  for (double& rate : rates) {
    switch (scheduler_.type) {
      case SchedulerType::kNone:
        break;
      case SchedulerType::kWarmupLr:
      case SchedulerType::kWarmupDecayLr: {
        const double own = scheduler_.type == SchedulerType::kWarmupLr ? rate : kWarmupDecayMaxLr;
        const double least = scheduler_.warmup_min_lr, greatest = scheduler_.warmup_max_lr.value_or(own);
        rate = least + (greatest - least) * gamma(iteration);
        break;
      }
      case SchedulerType::kWarmupCosineLr:
        rate *= ratio(iteration);
        break;
    }
  }
  return rates;
}

}  // namespace ballast
