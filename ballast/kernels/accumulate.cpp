#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/accumulate.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/formats-inl.h"
#include "ballast/kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

template <class Acc, class X>
struct AddTo {
  typename Acc::Stored* acc;
  const typename X::Stored* x;

  template <class D>
  HWY_INLINE void operator()(D d, std::size_t i) const {
    store<Acc>(d, hn::Add(load<Acc>(d, acc + i), load<X>(d, x + i)), acc + i);
  }
};

template <class Acc, class X>
void accumulate_as(void* acc, const void* x, std::size_t n) {
  for_lanes(n, AddTo<Acc, X>{static_cast<typename Acc::Stored*>(acc), static_cast<const typename X::Stored*>(x)});
}

template <class Acc>
void accumulate_into(void* acc, const void* x, Scalar x_type, std::size_t n) {
  switch (x_type) {
    case Scalar::kFloat32:
      return accumulate_as<Acc, Float32>(acc, x, n);
    case Scalar::kBFloat16:
      return accumulate_as<Acc, BFloat16>(acc, x, n);
    case Scalar::kFloat16:
      return accumulate_as<Acc, Float16>(acc, x, n);
  }
}

void accumulate_chunk(void* acc, Scalar acc_type, const void* x, Scalar x_type, std::size_t n) {
  switch (acc_type) {
    case Scalar::kFloat32:
      return accumulate_into<Float32>(acc, x, x_type, n);
    case Scalar::kBFloat16:
      return accumulate_into<BFloat16>(acc, x, x_type, n);
    case Scalar::kFloat16:
      return accumulate_into<Float16>(acc, x, x_type, n);
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(accumulate_chunk);

void accumulate(void* acc, Scalar acc_type, const void* x, Scalar x_type, std::int64_t n, int threads) noexcept {
  for_each_chunk(n, threads, [&](std::int64_t begin, std::int64_t count) {
    HWY_DYNAMIC_DISPATCH(accumulate_chunk)
    (at(acc, acc_type, begin), acc_type, at(x, x_type, begin), x_type, static_cast<std::size_t>(count));
  });
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
