#include "ballast/engine/progress_log.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <sstream>

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

}  // namespace

ProgressLog::ProgressLog(const Config& config, const World& world)
    : every_(config.steps_per_print), speaks_(world.rank() == 0) {
  if (config.wall_clock_breakdown)
    breakdown_.emplace(std::vector<std::string>{"backward", "reduce", "norm", "update", "publish"},
                       wait_for(world.device()));
}

void ProgressLog::window_ended(const StepReport& report, const Counters& counters) {
  if (!speaks_ || every_ == 0 || counters.global_steps % every_ != 0) return;
  std::ostringstream line;
  line << "step " << counters.global_steps << ": " << to_string(report.reason) << ", skipped " << counters.skipped_steps
       << ", gradient norm " << report.grad_norm << ", loss scale " << report.loss_scale << ", lr";
  for (double lr : report.lr) line << ' ' << lr;
  if (breakdown_) line << "; " << breakdown_->summary();
  log_info(line.str());
}

}  // namespace ballast
