#pragma once

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {

// The fp32 constants of each rule, made once a call: in double, in the order in which torch.optim forms them on the
// host, then rounded. Lanes only multiply, add, divide and take roots, so the same constants give the same bits on
// every instruction set.

struct AdamCoefficients {
  explicit AdamCoefficients(const AdamStep& step);

  float factor;
  float l2;       // decay added to the gradient; 0 when decoupled
  float shrink;   // 1 - lr*decay; 1 when not decoupled
  bool lerp_low;  // 1-beta1 < 0.5: m + weight*(g-m); otherwise g - weight*(g-m). torch.lerp makes the same choice
  float weight;   // 1-beta1, otherwise beta1
  float beta2, one_minus_beta2;
  float root_correction;  // sqrt(1 - beta2^t)
  float eps;
  float minus_step;  // -lr / (1 - beta1^t)
};

struct SgdCoefficients {
  explicit SgdCoefficients(const SgdStep& step);

  float factor, l2, minus_lr;
  bool has_momentum, fresh, nesterov;
  float momentum, one_minus_dampening;
};

struct LionCoefficients {
  explicit LionCoefficients(const LionStep& step);

  float factor, shrink, lr;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

}  // namespace ballast::kernels
