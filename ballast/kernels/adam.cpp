#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/adam.cpp"
#include <hwy/foreach_target.h>

#include "ballast/kernels/coefficients.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/update-inl.h"
#include "ballast/kernels/update.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

struct AdamRule {
  AdamCoefficients c;
  float* first;
  float* second;

  template <class D>
  HWY_INLINE hn::Vec<D> next(D d, hn::Vec<D> w, hn::Vec<D> g, std::size_t i) const {
    g = hn::Mul(g, hn::Set(d, c.factor));
    if (c.l2 != 0) g = hn::Add(g, hn::Mul(hn::Set(d, c.l2), w));
    w = hn::Mul(w, hn::Set(d, c.shrink));

    auto m = hn::LoadU(d, first + i);
    const auto change = hn::Mul(hn::Set(d, c.weight), hn::Sub(g, m));
    m = c.lerp_low ? hn::Add(m, change) : hn::Sub(g, change);
    hn::StoreU(m, d, first + i);

    const auto square = hn::Mul(hn::Mul(hn::Set(d, c.one_minus_beta2), g), g);
    const auto v = hn::Add(hn::Mul(hn::LoadU(d, second + i), hn::Set(d, c.beta2)), square);
    hn::StoreU(v, d, second + i);

    const auto root = hn::Div(hn::Sqrt(v), hn::Set(d, c.root_correction));
    const auto denominator = hn::Add(root, hn::Set(d, c.eps));
    return hn::Add(w, hn::Div(hn::Mul(hn::Set(d, c.minus_step), m), denominator));
  }
};

void adam_chunk(const AdamCoefficients& coefficients, const UpdateView& chunk, bool stream_out) {
  update_chunk(AdamRule{coefficients, chunk.first, chunk.second}, chunk, stream_out);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(adam_chunk);

void adam_update(const AdamStep& step, const UpdateView& view, int threads) noexcept {
  update<AdamCoefficients>(HWY_DYNAMIC_DISPATCH(adam_chunk), AdamCoefficients(step), view, threads);
}

}  // namespace ballast::kernels
#endif  // HWY_ONCE
