// The loop that all update rules share, for one instruction set: gradient in, new weight and its copy out. Included
// once per instruction set, after hwy/foreach_target.h.
#if defined(BALLAST_KERNELS_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_UPDATE_INL_H_
#undef BALLAST_KERNELS_UPDATE_INL_H_
#else
#define BALLAST_KERNELS_UPDATE_INL_H_
#endif

#include <hwy/cache_control.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ballast/kernels/formats-inl.h"
#include "ballast/kernels/update.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

struct NoCopy {
  using Stored = float;  // of a pointer that is null
};

/// A rule has `template <class D> Vec<D> next(D d, Vec<D> w, Vec<D> g, std::size_t i) const`: the new weights from the
/// old ones and the raw gradient; it reads and writes its moments itself.
template <class Rule, class Grad, class Copy>
struct UpdateLanes {
  Rule rule;
  float* master;
  const typename Grad::Stored* grad;
  typename Copy::Stored* out;

  template <bool kStream, class D>
  HWY_INLINE void at(D d, std::size_t i) const {
    const auto w = rule.next(d, hn::LoadU(d, master + i), load<Grad>(d, grad + i), i);
    hn::StoreU(w, d, master + i);
    if constexpr (!std::is_same_v<Copy, NoCopy>) {
      if constexpr (kStream) {
        stream<Copy>(d, w, out + i);
      } else {
        store<Copy>(d, w, out + i);
      }
    }
  }
};

template <class Rule, class Grad, class Copy>
void update_as(const Rule& rule, const UpdateView& chunk, bool stream_out) {
  using Stored = typename Copy::Stored;
  const UpdateLanes<Rule, Grad, Copy> lanes{rule, chunk.master, static_cast<const typename Grad::Stored*>(chunk.grad),
                                            static_cast<Stored*>(chunk.out)};
  const Whole d;
  const std::size_t n = static_cast<std::size_t>(chunk.n), step = hn::Lanes(d);
  std::size_t i = 0;
  if constexpr (!std::is_same_v<Copy, NoCopy>) {
    if (stream_out) {
      const std::size_t alignment = step * sizeof(Stored);
      for (; i < n && reinterpret_cast<std::uintptr_t>(lanes.out + i) % alignment != 0; ++i)
        lanes.template at<false>(One(), i);
      for (; i + step <= n; i += step) lanes.template at<true>(d, i);
      hwy::FlushStream();  // whoever is told that the pass is over must see the copy
    }
  }
  for (; i + step <= n; i += step) lanes.template at<false>(d, i);
  for (; i < n; ++i) lanes.template at<false>(One(), i);
}

template <class Rule, class Grad>
void update_from(const Rule& rule, const UpdateView& chunk, bool stream_out) {
  if (chunk.out == nullptr) return update_as<Rule, Grad, NoCopy>(rule, chunk, false);
  switch (chunk.out_type) {
    case Scalar::kFloat32:
      return update_as<Rule, Grad, Float32>(rule, chunk, stream_out);
    case Scalar::kBFloat16:
      return update_as<Rule, Grad, BFloat16>(rule, chunk, stream_out);
    case Scalar::kFloat16:
      return update_as<Rule, Grad, Float16>(rule, chunk, stream_out);
  }
}

template <class Rule>
void update_chunk(const Rule& rule, const UpdateView& chunk, bool stream_out) {
  switch (chunk.grad_type) {
    case Scalar::kFloat32:
      return update_from<Rule, Float32>(rule, chunk, stream_out);
    case Scalar::kBFloat16:
      return update_from<Rule, BFloat16>(rule, chunk, stream_out);
    case Scalar::kFloat16:
      return update_from<Rule, Float16>(rule, chunk, stream_out);
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
