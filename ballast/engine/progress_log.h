#pragma once

#include <cstdint>
#include <optional>

#include "ballast/comm/world.h"
#include "ballast/config/config.h"
#include "ballast/grads/step_report.h"
#include "ballast/monitor/breakdown.h"

namespace ballast {

struct Counters;

/// The engine's own lines in the log, from rank 0: every `steps_per_print` windows where training stands, and with
/// `wall_clock_breakdown` where its calls spent their time.
class ProgressLog {
 public:
  enum Phase : std::size_t { kBackward, kReduce, kNorm, kUpdate, kPublish };

  ProgressLog(const Config& config, const World& world);
  /// Counts the time until the timer dies to one phase.
  monitor::Breakdown::Timer time(Phase phase) { return {breakdown_ ? &*breakdown_ : nullptr, phase}; }
  void window_ended(const StepReport& report, const Counters& counters);

 private:
  std::int64_t every_;
  bool speaks_;
  std::optional<monitor::Breakdown> breakdown_;
};

}  // namespace ballast
