#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/sum_ranks.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/formats-inl.h"
#include "ballast/kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

template <class In>
struct SumOverRanks {
  float* out;
  const typename In::Stored* in;
  std::size_t ranks, stride;

  template <class D>
  HWY_INLINE void operator()(D d, std::size_t i) const {
    const typename In::Stored* from = in + i;
    auto sum = load<In>(d, from);
    for (std::size_t rank = 1; rank < ranks; ++rank) sum = hn::Add(sum, load<In>(d, from += stride));
    hn::StoreU(sum, d, out + i);
  }
};

template <class In>
void sum_ranks_as(float* out, const void* in, std::size_t ranks, std::size_t stride, std::size_t n) {
  for_lanes(n, SumOverRanks<In>{out, static_cast<const typename In::Stored*>(in), ranks, stride});
}

void sum_ranks_chunk(float* out, const void* in, Scalar in_type, std::size_t ranks, std::size_t stride, std::size_t n) {
  switch (in_type) {
    case Scalar::kFloat32:
      return sum_ranks_as<Float32>(out, in, ranks, stride, n);
    case Scalar::kBFloat16:
      return sum_ranks_as<BFloat16>(out, in, ranks, stride, n);
    case Scalar::kFloat16:
      return sum_ranks_as<Float16>(out, in, ranks, stride, n);
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(sum_ranks_chunk);

void sum_ranks(float* out, const void* in, Scalar in_type, int ranks, std::int64_t stride, std::int64_t n,
               int threads) noexcept {
  for_each_chunk(n, threads, [&](std::int64_t begin, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(sum_ranks_chunk)
    (out + begin, at(in, in_type, begin), in_type, static_cast<std::size_t>(ranks), static_cast<std::size_t>(stride),
     static_cast<std::size_t>(count));
  });
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
