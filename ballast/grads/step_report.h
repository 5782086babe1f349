#pragma once

#include <cstdint>
#include <vector>

namespace ballast {

enum class StepReason : std::uint8_t {
  kApplied,
  kMidWindow,    // managed mode, the window isn't full yet: nothing changed
  kEmptyWindow,  // no backward on any rank since the last window ended: nothing changed
  kNonFinite,    // a gradient was infinite or NaN on some rank: no state changed, the window is dropped
};
constexpr const char* to_string(StepReason reason) {
  constexpr const char* kNames[] = {"applied", "mid-window", "empty window", "non-finite gradient"};
  return kNames[static_cast<int>(reason)];
}

/// What step() did. Equal on all ranks, bit for bit.
struct StepReport {
  bool applied = false;
  StepReason reason = StepReason::kEmptyWindow;
  double grad_norm = 0;            // 2-norm of the normalised gradient over all parameters, before clipping
  double clip_factor = 1;          // what clipping multiplied the gradient by; 1: not clipped
  double loss_scale = 1;           // the scale that this window's backwards used
  std::int64_t micro_batches = 0;  // that the window held: most of any rank
  double weight = 0;               // global sum of the weights; 0 where none were given
  std::vector<double> lr;          // that this step used, one per parameter group
};

}  // namespace ballast
