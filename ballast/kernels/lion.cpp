#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/lion.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/coefficients.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/update-inl.h"
#include "ballast/kernels/update.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

struct LionRule {
  LionCoefficients c;
  float* momentum;

  template <class D>
  static HWY_INLINE hn::Vec<D> mix(D d, hn::Vec<D> m, float keep, hn::Vec<D> g, float take) {
    return hn::Add(hn::Mul(m, hn::Set(d, keep)), hn::Mul(g, hn::Set(d, take)));
  }

  template <class D>
  HWY_INLINE hn::Vec<D> next(D d, hn::Vec<D> w, hn::Vec<D> g, std::size_t i) const {
    g = hn::Mul(g, hn::Set(d, c.factor));
    const auto m = hn::LoadU(d, momentum + i);
    const auto direction = mix(d, m, c.beta1, g, c.one_minus_beta1);
    hn::StoreU(mix(d, m, c.beta2, g, c.one_minus_beta2), d, momentum + i);

    // lr * sign(direction), where the sign of zero and of NaN is 0.
    const auto zero = hn::Zero(d), lr = hn::Set(d, c.lr);
    const auto up = hn::IfThenElseZero(hn::Gt(direction, zero), lr);
    const auto down = hn::IfThenElseZero(hn::Gt(zero, direction), lr);
    return hn::Add(hn::Sub(hn::Mul(w, hn::Set(d, c.shrink)), up), down);
  }
};

void lion_chunk(const LionCoefficients& coefficients, const UpdateView& chunk, bool stream_out) {
  update_chunk(LionRule{coefficients, chunk.first}, chunk, stream_out);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(lion_chunk);

void lion_update(const LionStep& step, const UpdateView& view, int threads) noexcept {
  update<LionCoefficients>(HWY_DYNAMIC_DISPATCH(lion_chunk), LionCoefficients(step), view, threads);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
