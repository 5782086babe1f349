#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "ballast/comm/transport.h"

namespace c10d {
class Store;
}

namespace ballast {

/// A mesh of TCP connections between all ranks, found through `store`. Collective. loopback: all ranks are on this
/// machine. Device tensors are staged through host memory. Throws what c10d throws.
std::unique_ptr<Transport> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     std::chrono::milliseconds timeout, bool loopback);

}  // namespace ballast
