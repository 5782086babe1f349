#pragma once

#include <cstdint>

/// SIMD passes over flat arrays in host memory. Plain pointers: no tensors, no state, no allocation.
///
/// Common promises. The same bits for every instruction set (AVX-512, AVX2, SSE4, scalar) and every thread count; only
/// which NaN stands for a NaN may differ. All but sum_squares work element by element: a caller may split a range as it
/// likes. `threads`: at most so many OpenMP threads, the caller's among them; the work of a chunk of 65536 elements is
/// never shared, and 1 or less starts none. The caller's rounding mode and flushing of denormals don't matter. Arrays
/// start at any multiple of their element's size, n >= 0, and don't overlap unless a comment says so. noexcept: all
/// errors are the caller's.
namespace ballast::kernels {

enum class Scalar : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

/// acc[i] = round(acc[i] + x[i]): the sum is formed in fp32, then rounded to acc's type, to nearest even.
void accumulate(void* acc, Scalar acc_type, const void* x, Scalar x_type, std::int64_t n, int threads) noexcept;

/// out[i] = in[0*stride + i] + in[1*stride + i] + ... in fp32 and in this order (rank order), for i in [0, n).
void sum_ranks(float* out, const void* in, Scalar in_type, int ranks, std::int64_t stride, std::int64_t n,
               int threads) noexcept;

/// Sum of squares in double: element i goes to lane i mod 32 of its chunk of 65536; lanes, then chunks in index order.
/// Relative error about 2e-15. An infinite or NaN element makes the result non-finite; finite elements never do.
double sum_squares(const void* x, Scalar type, std::int64_t n, int threads) noexcept;

/// Elements that squares are added up over before anything else: sum_squares(x) is the sum, in order, of sum_squares of
/// x's slices of this length.
inline constexpr std::int64_t kSquaresChunk = 65536;

/// accumulate (or, with `first`, acc[i] = x[i], rounded), and squares[c] = sum_squares of slice c of the new acc, for
/// each of its ceil(n / kSquaresChunk) slices.
void land(void* acc, Scalar acc_type, const void* x, Scalar x_type, bool first, std::int64_t n, double* squares,
          int threads) noexcept;

/// to[i] = round-to-nearest-even(from[i]); NaN stays NaN.
void convert(void* to, Scalar to_type, const void* from, Scalar from_type, std::int64_t n, int threads) noexcept;

/// What one update pass reads and writes, n elements each.
struct UpdateView {
  float* master;     // fp32 weights, read and written
  float* first;      // first moment (Adam, Lion) or momentum buffer (SGD); null where the rule has none
  float* second;     // second moment (Adam); null otherwise
  const void* grad;  // read
  Scalar grad_type;
  void* out;        // the compute-dtype copy of the new master, written only; null: none wanted. Long ones (from 2^20
                    // elements) go past the caches
  Scalar out_type;  // without meaning when out is null
  std::int64_t n;
};

// The rules, in fp32 and in the order in which torch.optim computes; scalar constants in double, then rounded. g is
// grad * grad_factor, w the master, t the step.

/// Adam (Kingma and Ba, ICLR 2015) and AdamW (Loshchilov and Hutter, ICLR 2019), m and v zero before step 1:
///   AdamW: w = w * (1 - lr*weight_decay);  Adam: g = g + weight_decay*w
///   m = m + (1-beta1) * (g - m);  v = beta2*v + (1-beta2)*g*g
///   w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// Moves 28 bytes an element with a 16-bit gradient and copy, 28 with an fp32 gradient and no copy.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;     // true: AdamW
  std::int64_t step;  // >= 1: this parameter's update count
  double grad_factor;
};

/// Stochastic gradient descent as in torch.optim.SGD; b is the buffer `first`, unused when momentum is 0:
///   g = g + weight_decay*w;  b = g where the buffer is fresh, else momentum*b + (1-dampening)*g
///   w = w - lr * (nesterov ? g + momentum*b : b), with g for b when momentum is 0
struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool fresh;  // the buffer holds nothing yet and is only written
  double grad_factor;
};

/// Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2), m zero before the first
/// step:
///   w = w * (1 - lr*weight_decay) - lr * sign(beta1*m + (1-beta1)*g);  m = beta2*m + (1-beta2)*g
/// The sign of 0 and of NaN is 0.
struct LionStep {
  double lr, beta1, beta2, weight_decay, grad_factor;
};

void adam_update(const AdamStep& step, const UpdateView& view, int threads) noexcept;
void sgd_update(const SgdStep& step, const UpdateView& view, int threads) noexcept;
void lion_update(const LionStep& step, const UpdateView& view, int threads) noexcept;

/// The instruction set that the passes run on here, for logs: "AVX3", "AVX2", "SSE4", "NEON", "SCALAR", ...
const char* instruction_set() noexcept;

}  // namespace ballast::kernels
