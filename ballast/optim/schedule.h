#pragma once

#include <cstdint>
#include <vector>

#include "ballast/config/config.h"

namespace ballast {

/// The learning rate of every parameter group as a function of the applied steps alone: a skipped step doesn't advance
/// it, and its whole state is that one count. Values are those of DeepSpeed (deepspeed/runtime/lr_schedules.py), where
/// the scheduler advances after each applied step and starts at iteration -1. With n steps applied the next one uses
/// iteration i = last_batch_iteration + n; by default -1 for the first and 0 for the second. Let w = max(2,
/// warmup_num_steps), T = total_num_steps, and the warm-up's rise, for 0 <= i < w,
///   up(i) = ln(i + 1) / ln(w) (log)  or  i / w (linear).
/// WarmupLR, WarmupDecayLR: min + (max - min) * gamma(i), the rate of every group:
///   gamma = 0 for i < 0,  up(i) for i < w,  then 1 (WarmupLR) or max(0, (T - i) / max(1, T - w)) (WarmupDecayLR).
/// WarmupCosineLR: each group's lr * ratio(i):
///   ratio = 0 for i < 0,  r0 + (1 - r0) * up(i) for i < w (r0 = warmup_min_ratio),  then, with c = cos_min_ratio,
///   c + (1 - c) * (1 + cos(pi * min(1, (i - w + 1) / max(1, T - w)))) / 2.
class Schedule {
 public:
  Schedule(const SchedulerConfig& scheduler, const OptimizerConfig& optimizer);

  /// One rate per parameter group, for the step after `applied_steps` applied ones (>= 0). Group 0 is that of the
  /// parameters which no configured group matches; optimizer.params.groups follow in order.
  std::vector<double> lr(std::int64_t applied_steps) const;

 private:
  double rise(std::int64_t iteration) const;
  double gamma(std::int64_t iteration) const;
  double ratio(std::int64_t iteration) const;

  SchedulerConfig scheduler_;
  std::int64_t warmup_;           // w
  std::vector<double> group_lr_;  // as configured
};

}  // namespace ballast
