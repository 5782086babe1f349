#include "ballast/kernels/chunks.h"
#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

// A chunk of the sum is still in the cache when its squares are added up: the pass over memory is the addition's own.
void land(void* acc, Scalar acc_type, const void* x, Scalar x_type, bool first, std::int64_t n, double* squares,
          int threads) noexcept {
  for_each_chunk(n, threads, [&](std::int64_t begin, std::int64_t count) {
    void* to = at(acc, acc_type, begin);
    const void* from = at(x, x_type, begin);
    if (first) {
      convert(to, acc_type, from, x_type, count, 1);
    } else {
      accumulate(to, acc_type, from, x_type, count, 1);
    }
    squares[begin / kChunk] = sum_squares(to, acc_type, count, 1);
  });
}

}  // namespace ballast::kernels
