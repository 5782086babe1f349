#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/convert.cpp"
#include <hwy/foreach_target.h>

#include <cstring>

#include "ballast/kernels/chunks.h"
#include "ballast/kernels/formats-inl.h"
#include "ballast/kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

template <class To, class From>
struct Convert {
  typename To::Stored* to;
  const typename From::Stored* from;

  template <class D>
  HWY_INLINE void operator()(D d, std::size_t i) const {
    store<To>(d, load<From>(d, from + i), to + i);
  }
};

template <class To, class From>
void convert_as(void* to, const void* from, std::size_t n) {
  for_lanes(n,
            Convert<To, From>{static_cast<typename To::Stored*>(to), static_cast<const typename From::Stored*>(from)});
}

template <class To>
void convert_to(void* to, const void* from, Scalar from_type, std::size_t n) {
  switch (from_type) {
    case Scalar::kFloat32:
      return convert_as<To, Float32>(to, from, n);
    case Scalar::kBFloat16:
      return convert_as<To, BFloat16>(to, from, n);
    case Scalar::kFloat16:
      return convert_as<To, Float16>(to, from, n);
  }
}

void convert_chunk(void* to, Scalar to_type, const void* from, Scalar from_type, std::size_t n) {
  switch (to_type) {
    case Scalar::kFloat32:
      return convert_to<Float32>(to, from, from_type, n);
    case Scalar::kBFloat16:
      return convert_to<BFloat16>(to, from, from_type, n);
    case Scalar::kFloat16:
      return convert_to<Float16>(to, from, from_type, n);
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(convert_chunk);

void convert(void* to, Scalar to_type, const void* from, Scalar from_type, std::int64_t n, int threads) noexcept {
  for_each_chunk(n, threads, [&](std::int64_t begin, std::int64_t count) {
    void* const into = at(to, to_type, begin);
    const void* const source = at(from, from_type, begin);
    if (to_type == from_type) {
      std::memcpy(into, source, static_cast<std::size_t>(count * element_bytes(to_type)));
    } else {
      HWY_DYNAMIC_DISPATCH(convert_chunk)(into, to_type, source, from_type, static_cast<std::size_t>(count));
    }
  });
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
