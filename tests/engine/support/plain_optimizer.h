#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace ballast::testing {

/// Adam (Kingma and Ba, ICLR 2015, algorithm 1) in double precision: what the values in the tests are computed by.
/// A parameter without a gradient in a step isn't told of it, so counts and moments are per parameter.
struct PlainAdam {
  double lr = 0.1, beta1 = 0.9, beta2 = 0.999, eps = 1;
  struct State {
    std::int64_t step = 0;
    at::Tensor m, v;  // fp64, the parameter's shape
  };
  std::map<std::string, State> states;

  /// weight, gradient: fp64, equal shapes. Updates weight in place.
  void update(const std::string& name, at::Tensor& weight, const at::Tensor& gradient);
};

/// The same for one element: the values of a sequence of gradients, starting from `weight`.
class ScalarAdam {
 public:
  explicit ScalarAdam(double weight = 0, double lr = 0.1) : weight_(weight), lr_(lr) {}
  double step(double gradient);

 private:
  double weight_, lr_, m_ = 0, v_ = 0;
  std::int64_t step_ = 0;
};

}  // namespace ballast::testing
