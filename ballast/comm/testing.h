#pragma once

#include <functional>

#include "ballast/comm/world.h"

namespace ballast::testing {

/// A minute: a test that waits longer for a peer hangs. The CPU, or what BALLAST_TEST_DEVICE and BALLAST_TEST_BACKEND
/// say.
WorldOptions test_options();

/// The same, but ranks that are threads reach each other through memory instead of sockets: for tests of what builds on
/// communicators, of which many run.
WorldOptions thread_options();

/// Runs fn on n ranks of one world, a thread each, and joins them. Each thread computes with one thread. Rethrows the
/// first error by rank, one that isn't a CommError before those: they are mostly its consequences on the other ranks.
///
/// In a process that torchrun or mpirun started as one of several, the ranks are those processes instead (on CUDA
/// threads won't do: autograd has one thread a device): fn runs once, for this rank. Parts for one rank run in every
/// process, parts for other numbers of ranks say that they don't run.
void run_ranks(int n, const std::function<void(const World&)>& fn, const WorldOptions& options = test_options());

/// Whether run_ranks(n, fn) runs fn, and in one world: not for each of several processes by itself.
bool runs_in_one_world(int n);

}  // namespace ballast::testing
