#include "ballast/engine/progress_log.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>

#include "ballast/base/log.h"
#include "ballast/engine/engine.h"

namespace ballast {
namespace {

// A device runs behind the host: without waiting, its work would be counted to whatever phase waits next.
std::function<void()> wait_for(c10::Device device) {
  if (device.is_cpu()) return {};
  return [device] {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.getStream(device).synchronize();
  };
}

using Times = tiers::HostLane::Times;

std::string shares_of(const Times& now, const Times& before, double whole) {
  const auto share = [&](double seconds) { return monitor::format_share(seconds, whole); };
  std::string text = "waits for the host lane " + share((now.waited - before.waited).count()) + "; on the lane: ";
  double idle = whole;
  for (const auto& [kind, busy] : now.busy) {
    const auto earlier = before.busy.find(kind);
    const double seconds = busy.count() - (earlier == before.busy.end() ? 0 : earlier->second.count());
    idle -= seconds;
    text.append(kind).append(" ").append(share(seconds)).append(", ");
  }
  return text + "idle " + share(std::max(idle, 0.0));
}

}  // namespace

ProgressLog::ProgressLog(const Config& config, const World& world)
    : every_(config.steps_per_print), speaks_(world.rank() == 0) {
  if (config.wall_clock_breakdown)
    breakdown_.emplace(std::vector<std::string>{"backward", "reduce", "norm", "update", "publish"},
                       wait_for(world.device()));
}

monitor::Breakdown::Timer ProgressLog::time(Phase phase) {
  if (breakdown_ && !first_call_) first_call_ = std::chrono::steady_clock::now();
  return {breakdown_ ? &*breakdown_ : nullptr, phase};
}

void ProgressLog::watch(tiers::HostLane& lane) {
  lane_ = &lane;
  before_ = lane.times();
}

void ProgressLog::window_ended(const StepReport& report, const Counters& counters) {
  if (!speaks_ || every_ == 0 || counters.global_steps % every_ != 0) return;
  std::ostringstream line;
  line << "step " << counters.global_steps << ": " << to_string(report.reason) << ", skipped " << counters.skipped_steps
       << ", gradient norm " << report.grad_norm << ", loss scale " << report.loss_scale << ", lr";
  for (double lr : report.lr) line << ' ' << lr;
  if (breakdown_ && first_call_) {
    const double whole = std::chrono::duration<double>(std::chrono::steady_clock::now() - *first_call_).count();
    line << "; since the first backward: " << breakdown_->summary(whole, "the caller");
    if (lane_ != nullptr) line << "; " << shares_of(lane_->times(), before_, whole);
  }
  log_info(line.str());
}

}  // namespace ballast
