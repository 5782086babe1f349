#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "ballast/comm/world.h"
#include "ballast/config/config.h"
#include "ballast/grads/step_report.h"
#include "ballast/monitor/breakdown.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

struct Counters;

/// The engine's own lines in the log, from rank 0: every `steps_per_print` windows where training stands, and with
/// `wall_clock_breakdown` where the time went since the first of them: the engine's calls by phase, what is left to the
/// caller (forwards and its own work), how long the calls waited for the host lane, and what the lane did meanwhile.
class ProgressLog {
 public:
  enum Phase : std::size_t { kBackward, kReduce, kNorm, kUpdate, kPublish };

  ProgressLog(const Config& config, const World& world);
  /// Counts the time until the timer dies to one phase.
  monitor::Breakdown::Timer time(Phase phase);
  /// Counts what this lane does from now on too. It outlives the last window_ended().
  void watch(tiers::HostLane& lane);
  void window_ended(const StepReport& report, const Counters& counters);

 private:
  std::int64_t every_;
  bool speaks_;
  std::optional<monitor::Breakdown> breakdown_;
  std::optional<std::chrono::steady_clock::time_point> first_call_;
  tiers::HostLane* lane_ = nullptr;
  tiers::HostLane::Times before_;  // what it had done when watch() was called
};

}  // namespace ballast
