#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/sgd.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/coefficients.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/update-inl.h"
#include "ballast/kernels/update.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

struct SgdRule {
  SgdCoefficients c;
  float* buffer;

  template <class D>
  HWY_INLINE hn::Vec<D> next(D d, hn::Vec<D> w, hn::Vec<D> g, std::size_t i) const {
    g = hn::Mul(g, hn::Set(d, c.factor));
    if (c.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, c.l2), w));
    if (c.has_momentum) {
      auto b = g;
      if (!c.fresh) {  // what the buffer holds before is never read
        const auto damped = hn::Mul(hn::Set(d, c.one_minus_dampening), g);
        b = hn::Add(hn::Mul(hn::LoadU(d, buffer + i), hn::Set(d, c.momentum)), damped);
      }
      hn::StoreU(b, d, buffer + i);
      g = c.nesterov ? hn::Add(g, hn::Mul(hn::Set(d, c.momentum), b)) : b;
    }
    return hn::Add(w, hn::Mul(hn::Set(d, c.minus_lr), g));
  }
};

void sgd_chunk(const SgdCoefficients& coefficients, const UpdateView& chunk, bool stream_out) {
  update_chunk(SgdRule{coefficients, chunk.first}, chunk, stream_out);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(sgd_chunk);

void sgd_update(const SgdStep& step, const UpdateView& view, int threads) noexcept {
  update<SgdCoefficients>(HWY_DYNAMIC_DISPATCH(sgd_chunk), SgdCoefficients(step), view, threads);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
