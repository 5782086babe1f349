#include "ballast/kernels/coefficients.h"

#include <cmath>

namespace ballast::kernels {
namespace {

float rounded(double value) { return static_cast<float>(value); }

}  // namespace

AdamCoefficients::AdamCoefficients(const AdamStep& step)
    : factor(rounded(step.grad_factor)),
      l2(step.decoupled ? 0.0f : rounded(step.weight_decay)),
      shrink(step.decoupled ? rounded(1 - step.lr * step.weight_decay) : 1.0f),
      lerp_low(1 - step.beta1 < 0.5),
      weight(rounded(lerp_low ? 1 - step.beta1 : step.beta1)),
      beta2(rounded(step.beta2)),
      one_minus_beta2(rounded(1 - step.beta2)),
      root_correction(rounded(std::sqrt(1 - std::pow(step.beta2, static_cast<double>(step.step))))),
      eps(rounded(step.eps)),
      minus_step(rounded(-step.lr / (1 - std::pow(step.beta1, static_cast<double>(step.step))))) {}

SgdCoefficients::SgdCoefficients(const SgdStep& step)
    : factor(rounded(step.grad_factor)),
      l2(rounded(step.weight_decay)),
      minus_lr(rounded(-step.lr)),
      has_momentum(step.momentum != 0),
      fresh(step.fresh),
      nesterov(step.nesterov),
      momentum(rounded(step.momentum)),
      one_minus_dampening(rounded(1 - step.dampening)) {}

LionCoefficients::LionCoefficients(const LionStep& step)
    : factor(rounded(step.grad_factor)),
      shrink(rounded(1 - step.lr * step.weight_decay)),
      lr(rounded(step.lr)),
      beta1(rounded(step.beta1)),
      one_minus_beta1(rounded(1 - step.beta1)),
      beta2(rounded(step.beta2)),
      one_minus_beta2(rounded(1 - step.beta2)) {}

}  // namespace ballast::kernels
