#pragma once

#include "ballast/comm/rounds.h"
#include "ballast/config/config.h"

namespace ballast {

/// OpenMP threads of this rank's passes on the host: what the configuration says, or else the processors that the
/// process may use (its affinity), shared equally by the ranks on this machine. Collective.
int host_threads(const Config& config, Rounds& rounds);

}  // namespace ballast
