#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>

namespace ballast {

/// One collective under way. Destroying it unfinished is safe only after an error.
class Flight {
 public:
  virtual ~Flight() = default;
  /// Returns when the output may be used (CUDA: by work queued on the current stream from now on). Throws whatever the
  /// library below throws.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  /// Does wait() hold up the calling thread, or only the work that is queued on its stream?
  virtual bool blocks_host() const noexcept = 0;
  /// After wait(): has it ended? Asked only where wait() doesn't hold up the thread. Throws as wait().
  virtual bool finished() { return true; }
};

/// What a communicator of two or more ranks runs on. Tensors are one-dimensional contiguous bytes whose sizes have been
/// checked; sequence numbers the collectives, 1, 2, ..., alike on all ranks.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<Flight> all_gather(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) = 0;
  virtual std::unique_ptr<Flight> all_to_all(const at::Tensor& out, const at::Tensor& in, std::uint64_t sequence) = 0;
  virtual std::unique_ptr<Flight> broadcast(const at::Tensor& data, int root, std::uint64_t sequence) = 0;
};

}  // namespace ballast
