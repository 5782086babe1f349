#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "ballast/base/ledger.h"
#include "ballast/config/config.h"
#include "ballast/layout/layout.h"

namespace ballast {

struct MemoryPlanOptions {
  int world = 1;
  c10::DeviceType device = c10::DeviceType::CPU;
  /// Collectives wait for the peers on the host: on the CPU always, next to an accelerator over Gloo.
  bool collectives_on_host = device == c10::DeviceType::CPU;
  /// Backwards in a window. From two on the contributions that stages 0-1 keep are added up in the accumulation dtype.
  std::int64_t backwards = 1;
};

/// What one rank's ledger will show, before anything is allocated: the sequence of allocations of two windows
/// (parameters, optimizer states, contributions, reductions in flight, sums, gathered units) is played on a ledger
/// without tensors. docs/memory.md has the closed forms. Assumes that every parameter is used once a backward, in the
/// order of the layout. Counts what the engine keeps, not activations. Throws ConfigError as the engine would.
std::shared_ptr<Ledger> plan_memory(const Layout& layout, const Config& config, const MemoryPlanOptions& options);

}  // namespace ballast
