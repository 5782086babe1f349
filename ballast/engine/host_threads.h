#pragma once

#include <c10/core/Device.h>

#include "ballast/comm/rounds.h"
#include "ballast/config/config.h"

namespace ballast {

/// How many ranks share this machine, this one among them. Collective.
int ranks_on_this_machine(Rounds& rounds);

/// OpenMP threads of a rank's passes on the host: what the configuration says, or else the processors that the process
/// may use (its affinity), shared equally by the ranks on this machine; where an accelerator computes, one of them
/// stays with the thread that feeds it (H200, 16 processors: 2% of a window of one backward).
int host_threads(const Config& config, int ranks_here, c10::Device device);

}  // namespace ballast
