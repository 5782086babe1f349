#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "ballast/comm/transport.h"

namespace c10d {
class Store;
}

namespace ballast {

/// Whether this was built for CUDA. LibTorch may have it all the same: in a Python that imported a CUDA build.
bool nccl_available() noexcept;

/// One NCCL communicator over all ranks, one GPU each, connected when it returns. Collective. Throws CommError where
/// LibTorch has no CUDA, otherwise what c10d throws.
std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                     c10::Device device, std::chrono::milliseconds timeout);

}  // namespace ballast
