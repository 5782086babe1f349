#pragma once

#include <cstdint>

#include "ballast/config/config.h"
#include "ballast/engine/memory_plan.h"
#include "ballast/layout/layout.h"

namespace ballast {

/// Throws MemoryError where the host memory that `ranks` ranks with this plan need on one machine is more than
/// `available` bytes: what is needed, by kind, and the cheapest change of the configuration that fits. Before anything
/// is allocated, since a process that the system kills for memory tells nobody why.
void check_host_budget(const Layout& layout, const Config& config, const MemoryPlanOptions& options, int ranks,
                       std::int64_t available);

}  // namespace ballast
