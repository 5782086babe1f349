#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace ballast::testing {

/// What one backward pulls at: each named parameter with the gradient that every one of its elements gets.
using Pull = std::vector<std::pair<std::string, double>>;
/// The same for a model with the single parameter "p".
inline Pull pull(double gradient) { return {{"p", gradient}}; }

struct Named {
  std::string name;  // dots make child modules, each of which is a unit of its own: "head.p"
  std::vector<std::int64_t> shape;
  double start = 0;
  bool trainable = true;
};

/// A module of parameters without arithmetic of its own: a test decides which of them a loss uses and what gradient
/// each gets, exactly, in every dtype that holds the coefficient.
class Lin : public torch::nn::Module {
 public:
  explicit Lin(const std::vector<Named>& parameters);

  at::Tensor& parameter(const std::string& name);
  /// Registers an existing parameter under a second name too.
  void tie(const std::string& existing, const std::string& second);

 private:
  Lin() = default;
  std::pair<Lin*, std::string> place(const std::string& name, bool create);
};

std::shared_ptr<Lin> lin(std::int64_t n, double start = 0);
std::shared_ptr<Lin> lin(const std::vector<Named>& parameters);

/// sum(coefficient * parameter): the gradient is the coefficient in every element. With a tensor: elementwise.
at::Tensor weighed_sum(const at::Tensor& parameter, double coefficient);
at::Tensor weighed_sum(const at::Tensor& parameter, const at::Tensor& coefficients);
/// The sum over all that `pull` names, in its order.
at::Tensor loss_of(Lin& model, const Pull& pull);

}  // namespace ballast::testing
