#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/sum_squares.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/formats-inl.h"
#include "ballast/kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

/// Element i of the chunk adds to lane i mod 32, whatever a vector holds: 4 vectors of 8 doubles, 8 of 4, 16 of 2 or 32
/// of 1 are the same 32 running sums. That also keeps enough additions in flight.
inline constexpr std::size_t kSumLanes = 32;

template <class X>
double sum_squares_as(const void* array, std::size_t n) {
  const auto* x = static_cast<const typename X::Stored*>(array);
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> narrow;
  constexpr std::size_t kLanes = hn::MaxLanes(decltype(d)());
  constexpr std::size_t kVectors = kSumLanes / kLanes;

  hn::Vec<decltype(d)> sums[kVectors];
  for (auto& sum : sums) sum = hn::Zero(d);
  std::size_t i = 0;
  for (; i + kSumLanes <= n; i += kSumLanes) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const auto wide = hn::PromoteTo(d, load<X>(narrow, x + i + v * kLanes));
      sums[v] = hn::Add(sums[v], hn::Mul(wide, wide));
    }
  }
  HWY_ALIGN double lanes[kSumLanes];
  for (std::size_t v = 0; v < kVectors; ++v) hn::Store(sums[v], d, lanes + v * kLanes);
  for (std::size_t lane = 0; i < n; ++i, ++lane) {
    const double wide = hn::GetLane(load<X>(One(), x + i));
    lanes[lane] += wide * wide;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double sum_squares_chunk(const void* x, Scalar type, std::size_t n) {
  switch (type) {
    case Scalar::kFloat32:
      return sum_squares_as<Float32>(x, n);
    case Scalar::kBFloat16:
      return sum_squares_as<BFloat16>(x, n);
    case Scalar::kFloat16:
      return sum_squares_as<Float16>(x, n);
  }
  return 0;
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(sum_squares_chunk);

double sum_squares(const void* x, Scalar type, std::int64_t n, int threads) noexcept {
  constexpr std::int64_t kGroup = 1024;  // chunks whose partials fit on the stack; 64 M elements a dispatch
  double partials[kGroup];
  double sum = 0;
  for (std::int64_t start = 0; start < n; start += kGroup * kChunk) {
    const std::int64_t length = std::min(n - start, kGroup * kChunk);
    for_each_chunk(length, threads, [&](std::int64_t begin, std::int64_t count) {
      partials[begin / kChunk] =
          HWY_DYNAMIC_DISPATCH(sum_squares_chunk)(at(x, type, start + begin), type, static_cast<std::size_t>(count));
    });
    for (std::int64_t chunk = 0; chunk * kChunk < length; ++chunk) sum += partials[chunk];
  }
  return sum;
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
