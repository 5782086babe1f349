#pragma once

#include <atomic>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ballast/comm/world.h"

namespace ballast {

/// What copies of a World share.
struct World::State {
  State(int rank, int size, c10::Device device, const WorldOptions& options, bool loopback)
      : rank(rank), size(size), device(device), options(options), loopback(loopback) {}

  const int rank, size;
  const c10::Device device;
  const WorldOptions options;
  const bool loopback;                          // all ranks are on this machine
  c10::intrusive_ptr<c10d::Store> store;        // null with one rank
  std::atomic<std::int64_t> communicators = 0;  // made so far; names the next one's keys, alike on all ranks
};

}  // namespace ballast
