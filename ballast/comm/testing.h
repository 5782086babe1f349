#pragma once

#include <functional>

#include "ballast/comm/world.h"

namespace ballast::testing {

/// CPU, and a minute: a test that waits longer for a peer hangs.
WorldOptions test_options();

/// Runs fn on n ranks of one world, a thread each, and joins them. Each thread computes with one thread. Rethrows the
/// first error by rank, one that isn't a CommError before those: they are mostly its consequences on the other ranks.
void run_ranks(int n, const std::function<void(const World&)>& fn, const WorldOptions& options = test_options());

}  // namespace ballast::testing
