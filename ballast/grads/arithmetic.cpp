#include "ballast/grads/arithmetic.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "ballast/base/error.h"

namespace ballast {

kernels::Scalar scalar_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Scalar::kFloat32;
    case at::kBFloat16:
      return kernels::Scalar::kBFloat16;
    case at::kHalf:
      return kernels::Scalar::kFloat16;
    default:
      throw UseError("grads.scalar_of", "no pass for this element type (", c10::toString(tensor.scalar_type()), ")");
  }
}

void accumulate(const at::Tensor& acc, const at::Tensor& x) {
  if (acc.is_cpu()) {
    kernels::accumulate(acc.data_ptr(), scalar_of(acc), x.const_data_ptr(), scalar_of(x), acc.numel(),
                        at::get_num_threads());
  } else if (acc.scalar_type() == at::kFloat) {
    acc.add_(x);
  } else {
    acc.copy_(acc.to(at::kFloat).add_(x));
  }
}

at::Tensor sum_in_rank_order(const at::Tensor& received, std::int64_t ranks) {
  const std::int64_t n = received.numel() / ranks;
  at::Tensor sum = at::empty({n}, received.options().dtype(at::kFloat));
  if (received.is_cpu()) {
    kernels::sum_ranks(sum.mutable_data_ptr<float>(), received.const_data_ptr(), scalar_of(received),
                       static_cast<int>(ranks), n, n, at::get_num_threads());
  } else {
    sum.copy_(received.narrow(0, 0, n));
    for (std::int64_t r = 1; r < ranks; ++r) sum.add_(received.narrow(0, r * n, n));
  }
  return sum;
}

void SquareSums::add(std::int64_t rank, const at::Tensor& shard) {
  if (shard.is_cpu()) {
    add(rank, kernels::sum_squares(shard.const_data_ptr(), scalar_of(shard), shard.numel(), at::get_num_threads()));
  } else {
    // linalg's norm accumulates in double here and is deterministic for a given length.
    on_device_.push_back({rank, at::linalg_vector_norm(shard, 2, {}, false, at::kDouble)});
  }
}

std::vector<double> SquareSums::sums() {
  if (!on_device_.empty()) {
    std::vector<at::Tensor> values;
    for (const OnDevice& part : on_device_) values.push_back(part.value);
    const at::Tensor fetched = at::stack(values).cpu();
    for (std::size_t i = 0; i < on_device_.size(); ++i) {
      const double norm = fetched.const_data_ptr<double>()[i];
      sums_[static_cast<std::size_t>(on_device_[i].rank)] += norm * norm;
    }
    on_device_.clear();
  }
  return sums_;
}

}  // namespace ballast
