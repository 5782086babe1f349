#include "tests/engine/support/plain_optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

namespace ballast::testing {

void PlainAdam::update(const std::string& name, at::Tensor& weight, const at::Tensor& gradient) {
  State& state = states[name];
  if (state.step == 0) {
    state.m = at::zeros_like(gradient);
    state.v = at::zeros_like(gradient);
  }
  const double t = static_cast<double>(++state.step);
  state.m = state.m * beta1 + gradient * (1 - beta1);
  state.v = state.v * beta2 + gradient * gradient * (1 - beta2);
  const at::Tensor mean = state.m / (1 - std::pow(beta1, t));
  const at::Tensor root = (state.v / (1 - std::pow(beta2, t))).sqrt();
  weight = weight - mean / (root + eps) * lr;
}

double ScalarAdam::step(double gradient) {
  constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1;
  m_ = kBeta1 * m_ + (1 - kBeta1) * gradient;
  v_ = kBeta2 * v_ + (1 - kBeta2) * gradient * gradient;
  const double t = static_cast<double>(++step_);
  weight_ -= lr_ * (m_ / (1 - std::pow(kBeta1, t))) / (std::sqrt(v_ / (1 - std::pow(kBeta2, t))) + kEps);
  return weight_;
}

}  // namespace ballast::testing
