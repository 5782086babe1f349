#pragma once

#include <cmath>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels::testing {

/// One element's state. m: first moment or momentum buffer.
struct Weight {
  float w, m, v;
};

// The rules on one element, in fp32 and in the order of torch.optim's loops; constants in double, then rounded.

inline void reference(const AdamStep& step, Weight& x, float grad) {
  const auto t = static_cast<double>(step.step);
  float g = grad * static_cast<float>(step.grad_factor);
  if (step.decoupled) {
    x.w *= static_cast<float>(1 - step.lr * step.weight_decay);
  } else if (step.weight_decay != 0) {
    g += static_cast<float>(step.weight_decay) * x.w;
  }
  const double weight = 1 - step.beta1;
  x.m = weight < 0.5 ? x.m + static_cast<float>(weight) * (g - x.m) : g - (g - x.m) * static_cast<float>(1 - weight);
  x.v = x.v * static_cast<float>(step.beta2) + static_cast<float>(1 - step.beta2) * g * g;
  const float root = std::sqrt(x.v) / static_cast<float>(std::sqrt(1 - std::pow(step.beta2, t)));
  const float denominator = root + static_cast<float>(step.eps);
  x.w += static_cast<float>(-(step.lr / (1 - std::pow(step.beta1, t)))) * x.m / denominator;
}

inline void reference(const SgdStep& step, Weight& x, float grad) {
  float g = grad * static_cast<float>(step.grad_factor);
  if (step.weight_decay != 0) g += static_cast<float>(step.weight_decay) * x.w;
  if (step.momentum != 0) {
    x.m = step.fresh ? g : x.m * static_cast<float>(step.momentum) + static_cast<float>(1 - step.dampening) * g;
    g = step.nesterov ? g + static_cast<float>(step.momentum) * x.m : x.m;
  }
  x.w -= static_cast<float>(step.lr) * g;
}

inline void reference(const LionStep& step, Weight& x, float grad) {
  const float g = grad * static_cast<float>(step.grad_factor);
  const float c = x.m * static_cast<float>(step.beta1) + static_cast<float>(1 - step.beta1) * g;
  x.w *= static_cast<float>(1 - step.lr * step.weight_decay);
  if (c > 0) x.w -= static_cast<float>(step.lr);
  if (c < 0) x.w += static_cast<float>(step.lr);
  x.m = x.m * static_cast<float>(step.beta2) + static_cast<float>(1 - step.beta2) * g;
}

}  // namespace ballast::kernels::testing
