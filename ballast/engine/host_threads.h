#pragma once

#include <c10/core/Device.h>

#include "ballast/comm/rounds.h"
#include "ballast/config/config.h"

namespace ballast {

/// OpenMP threads of this rank's passes on the host: what the configuration says, or else the processors that the
/// process may use (its affinity), shared equally by the ranks on this machine; where an accelerator computes, one of
/// them stays with the thread that feeds it (H200, 16 processors: 2% of a window of one backward). Collective.
int host_threads(const Config& config, Rounds& rounds, c10::Device device);

}  // namespace ballast
