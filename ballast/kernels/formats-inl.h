// The three element formats as lanes of fp32, for one instruction set: decode, encode, load, store. Included once per
// instruction set (no ordinary guard), after hwy/foreach_target.h.
#if defined(BALLAST_KERNELS_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_FORMATS_INL_H_
#undef BALLAST_KERNELS_FORMATS_INL_H_
#else
#define BALLAST_KERNELS_FORMATS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// A full vector of fp32, and one lane. Tails run one lane at a time through the same templates, never through masked
/// loads: those of 16-bit lanes may touch bytes behind the end on some instruction sets.
using Whole = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;

inline constexpr int kInfinityBits = 0x7f800000;
inline constexpr int kMagnitudeBits = 0x7fffffff;

struct Float32 {
  using Stored = float;
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D, hn::Vec<D> v) {
    return v;
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> encode(D, hn::Vec<D> v) {
    return v;
  }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> bits) {
    const hn::RebindToSigned<D> di;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(di, bits)));
  }
  /// Round to nearest even in integers, since Highway's own demotion cuts. Every NaN becomes 0x7fc0, as in PyTorch.
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> encode(D, hn::Vec<D> v) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToSigned<D> di;
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
    const auto magnitude = hn::And(hn::BitCast(di, bits), hn::Set(di, kMagnitudeBits));
    const auto is_nan = hn::Gt(magnitude, hn::Set(di, kInfinityBits));
    return hn::DemoteTo(d16, hn::IfThenElse(is_nan, hn::Set(di, 0x7fc0), hn::BitCast(di, rounded)));
  }
};

/// IEEE binary16. NaNs keep their sign and the upper ten bits of their payload and become quiet, as x86's instructions
/// do it; Highway's own conversions for CPUs without them cut instead of rounding and lose infinities and NaNs.
struct Float16 {
  using Stored = std::uint16_t;
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> bits) {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(d, hn::BitCast(d16, bits));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> encode(D, hn::Vec<D> v) {
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<std::uint16_t, D> bits;
    return hn::BitCast(bits, hn::DemoteTo(d16, v));
  }
#else
  template <class D>
  static HWY_INLINE hn::Vec<D> decode(D d, hn::Vec<hn::Rebind<std::uint16_t, D>> bits16) {
    const hn::RebindToSigned<D> di;
    const auto bits = hn::PromoteTo(di, bits16);
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(di, 0x8000)));
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7fff));
    const auto infinity = hn::Set(di, 0x7c00);
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto normal = hn::Add(shifted, hn::Set(di, (127 - 15) << 23));
    const auto subnormal = hn::BitCast(di, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24f)));  // exact
    const auto special = hn::Or(shifted, hn::Set(di, kInfinityBits));
    auto result = hn::IfThenElse(hn::Gt(hn::Set(di, 0x0400), magnitude), subnormal, normal);
    result = hn::IfThenElse(hn::Gt(infinity, magnitude), result, special);
    result = hn::IfThenElse(hn::Gt(magnitude, infinity), hn::Or(special, hn::Set(di, 0x00400000)), result);
    return hn::BitCast(d, hn::Or(sign, result));
  }
  template <class D>
  static HWY_INLINE hn::Vec<hn::Rebind<std::uint16_t, D>> encode(D d, hn::Vec<D> v) {
    const hn::Rebind<std::uint16_t, D> d16;
    const hn::RebindToSigned<D> di;
    const auto bits = hn::BitCast(di, v);
    const auto magnitude = hn::And(bits, hn::Set(di, kMagnitudeBits));
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
    const auto rounded = hn::ShiftRight<13>(hn::Add(magnitude, hn::Add(odd, hn::Set(di, 0xfff))));
    const auto normal = hn::Sub(rounded, hn::Set(di, (127 - 15) << 10));
    // Below 2^-14 the result counts units of 2^-24, and that is the last bit of a float in [0.5, 1): the addition
    // rounds.
    const auto half = hn::Set(d, 0.5f);
    const auto counted = hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), half));
    const auto subnormal = hn::Sub(counted, hn::BitCast(di, half));
    const auto nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 0x03ff)), hn::Set(di, 0x7e00));
    auto result = hn::IfThenElse(hn::Gt(hn::Set(di, 0x38800000), magnitude), subnormal, normal);       // < 2^-14
    result = hn::IfThenElse(hn::Gt(hn::Set(di, 0x477ff000), magnitude), result, hn::Set(di, 0x7c00));  // >= 65520
    result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, kInfinityBits)), nan, result);
    return hn::DemoteTo(d16, hn::Or(sign, result));
  }
#endif
};

template <class Format, class D>
HWY_INLINE hn::Vec<D> load(D d, const typename Format::Stored* from) {
  const hn::Rebind<typename Format::Stored, D> stored;
  return Format::decode(d, hn::LoadU(stored, from));
}

template <class Format, class D>
HWY_INLINE void store(D d, hn::Vec<D> v, typename Format::Stored* to) {
  const hn::Rebind<typename Format::Stored, D> stored;
  hn::StoreU(Format::encode(d, v), stored, to);
}

/// Past the caches, for what is written once and not read soon. `to` is aligned to a whole vector of Format. Highway
/// writes at least 16 bytes, whatever a shorter vector holds: those are stored.
template <class Format, class D>
HWY_INLINE void stream(D d, hn::Vec<D> v, typename Format::Stored* to) {
  const hn::Rebind<typename Format::Stored, D> stored;
  if constexpr (hn::MaxLanes(D()) * sizeof(*to) >= 16) {
    hn::Stream(Format::encode(d, v), stored, to);
  } else {
    hn::StoreU(Format::encode(d, v), stored, to);
  }
}

/// body(d, i) at every i in [0, n): whole vectors, then single lanes.
template <class Body>
HWY_INLINE void for_lanes(std::size_t n, const Body& body) {
  const Whole d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) body(d, i);
  for (; i < n; ++i) body(One(), i);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
