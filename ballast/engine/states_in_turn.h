#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <vector>

#include "ballast/optim/optimizer_states.h"

namespace ballast {

/// This rank's optimizer states for a save, part by part. Those on disk are copied, the next part while the one before
/// it is written: two parts take turns in memory that is there, since new memory would take longer to get than the
/// copy.
class StatesInTurn {
 public:
  /// tier: where those lie that aren't on the device.
  StatesInTurn(OptimizerStates& optimizer, Tier tier) : optimizer_(optimizer), copies_(tier == Tier::kNvme) {}

  /// A part that take() will give, behind those before. flat: of the unit's buffer.
  void add(int unit, Range flat);
  /// The first part, then the next: runs by flat elements of the unit. Good until the next call. Throws IoError.
  std::vector<StateRun> take();

 private:
  void begin();

  OptimizerStates& optimizer_;
  const bool copies_;
  std::vector<StateChunk> parts_;  // by elements that the rank keeps
  std::size_t begun_ = 0;
  std::array<at::Tensor, 2> memory_;
  StateRead next_;
};

}  // namespace ballast
