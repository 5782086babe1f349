#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/nccl.h"

namespace ballast {

bool nccl_available() noexcept { return false; }

std::unique_ptr<Transport> make_nccl(const c10::intrusive_ptr<c10d::Store>&, int rank, int size, c10::Device,
                                     std::chrono::milliseconds) {
  throw CommError("comm.make_nccl", "built against a LibTorch without CUDA (backend nccl, rank ", rank, " of ", size,
                  "); use backend gloo or a CUDA build of PyTorch");
}

}  // namespace ballast
