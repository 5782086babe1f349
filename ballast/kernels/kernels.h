#pragma once

#include <cstdint>

/// SIMD passes over flat arrays in host memory. Plain pointers: no tensors, no threads of their own state, no allocation.
///
/// Common promises. The same bits for every instruction set (AVX-512, AVX2, SSE4, scalar), every split of a range into
/// sub-ranges that these functions do themselves, and every thread count. Any alignment of the start, any n >= 0. Arrays
/// don't overlap unless a comment says so. noexcept: all errors are the caller's.
namespace ballast::kernels {

enum class Scalar : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

/// acc[i] = round(acc[i] + x[i]), the sum formed in fp32.
void accumulate(void* acc, Scalar acc_type, const void* x, Scalar x_type, std::int64_t n, int threads) noexcept;

/// out[i] = in[0*stride + i] + in[1*stride + i] + ... in fp32 and in this order (rank order), for i in [0, n).
void sum_ranks(float* out, const void* in, Scalar in_type, int ranks, std::int64_t stride, std::int64_t n,
               int threads) noexcept;

/// Sum of squares in double: element i goes to lane i mod 32 of its chunk of 65536; lanes, then chunks in index order.
/// Relative error about 2e-15. An infinite or NaN element makes the result non-finite; finite elements never do.
double sum_squares(const void* x, Scalar type, std::int64_t n, int threads) noexcept;

/// to[i] = round-to-nearest-even(from[i]); NaN stays NaN.
void convert(void* to, Scalar to_type, const void* from, Scalar from_type, std::int64_t n, int threads) noexcept;

/// What one update pass reads and writes, n elements each.
struct UpdateView {
  float* master;      // fp32 weights, read and written
  float* first;       // first moment (Adam, Lion) or momentum buffer (SGD); null where the rule has none
  float* second;      // second moment (Adam); null otherwise
  const void* grad;   // read
  Scalar grad_type;
  void* out;          // the compute-dtype copy of the new master, written only; null: none wanted. Aliases nothing
  Scalar out_type;
  std::int64_t n;
};

struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;      // true: AdamW (Loshchilov and Hutter, ICLR 2019); false: decay is added to the gradient
  std::int64_t step;   // >= 1: this parameter's update count, for the bias corrections
  double grad_factor;  // the gradient is grad * grad_factor
};
struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  std::int64_t step;   // 1: the buffer is set to the gradient, as in torch.optim.SGD
  double grad_factor;
};
struct LionStep {      // Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2
  double lr, beta1, beta2, weight_decay, grad_factor;
};

void adam_update(const AdamStep& step, const UpdateView& view, int threads) noexcept;
void sgd_update(const SgdStep& step, const UpdateView& view, int threads) noexcept;
void lion_update(const LionStep& step, const UpdateView& view, int threads) noexcept;

/// The instruction set that the passes run on here ("AVX3", "AVX2", "SSE4", "EMU128"), for logs.
const char* instruction_set() noexcept;

}  // namespace ballast::kernels
