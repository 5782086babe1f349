#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "ballast/kernels/kernels.h"

/// Sums of flat gradients with a fixed order of additions: host tensors go to the SIMD passes of kernels/, device
/// tensors to ATen. All tensors are 1-D and contiguous.
namespace ballast {

/// The element type of a tensor for kernels/. UseError for other types than float32, bfloat16 and float16.
kernels::Scalar scalar_of(const at::Tensor& tensor);

/// acc += x, formed in fp32, rounded to acc's dtype. Same device and length.
void accumulate(const at::Tensor& acc, const at::Tensor& x);

/// fp32 [n]: the sum over ranks, in rank order, of received [ranks * n] (any dtype).
at::Tensor sum_in_rank_order(const at::Tensor& received, std::int64_t ranks);

/// Collects sums of squares of shards and adds them up in the order in which they came, one sum a rank. Device results
/// stay on the device until sums() fetches them all at once.
class SquareSums {
 public:
  explicit SquareSums(std::int64_t ranks) : sums_(static_cast<std::size_t>(ranks), 0.0) {}
  void add(std::int64_t rank, const at::Tensor& shard);
  void add(std::int64_t rank, double squares) { sums_[static_cast<std::size_t>(rank)] += squares; }
  std::vector<double> sums();

 private:
  struct OnDevice {
    std::int64_t rank;
    at::Tensor value;
  };
  std::vector<double> sums_;
  std::vector<OnDevice> on_device_;
};

}  // namespace ballast
