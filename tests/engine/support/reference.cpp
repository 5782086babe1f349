#include "tests/engine/support/reference.h"

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

namespace ballast::testing {

Reference::Reference(std::shared_ptr<torch::nn::Module> model, c10::ScalarType compute,
                     const MakeOptimizer& make_optimizer) {
  std::map<c10::TensorImpl*, std::size_t> known;
  std::vector<at::Tensor> masters;
  for (const auto& item : model->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    const auto [entry, fresh] = known.try_emplace(item.value().unsafeGetTensorImpl(), weights_.size());
    by_name_[item.key()] = entry->second;
    if (!fresh) continue;
    masters.push_back(item.value().detach().clone().set_requires_grad(true));
    weights_.push_back({item.value(), masters.back(), {}});
  }
  const torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : model->parameters()) parameter.set_data(parameter.to(compute));
  optimizer_ = make_optimizer(masters);
}

void Reference::backward(const at::Tensor& loss, double root) {
  loss.backward(at::full_like(loss, root));
  for (Weight& weight : weights_) {
    at::Tensor& grad = weight.compute.mutable_grad();
    if (!grad.defined()) continue;
    const at::Tensor contribution = grad.to(at::kFloat);
    weight.sum = weight.sum.defined() ? weight.sum + contribution : contribution;
    grad.reset();
  }
}

double Reference::step(double divisor, double clip) {
  const torch::NoGradGuard no_grad;
  double squares = 0;
  for (Weight& weight : weights_) {
    if (!weight.sum.defined()) continue;
    weight.sum = weight.sum / divisor;
    squares += weight.sum.to(at::kDouble).square().sum().item<double>();
  }
  const double norm = std::sqrt(squares);
  const double factor = clip > 0 && norm > clip ? clip / (norm + 1e-6) : 1;  // as clip_grad_norm_
  for (Weight& weight : weights_) {
    if (weight.sum.defined()) weight.master.mutable_grad() = weight.sum * factor;
  }
  optimizer_->step();
  for (Weight& weight : weights_) {
    weight.compute.copy_(weight.master);
    weight.master.mutable_grad().reset();
    weight.sum.reset();
  }
  return norm;
}

std::map<std::string, at::Tensor> Reference::masters() const {
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, index] : by_name_) all[name] = weights_[index].master.detach();
  return all;
}

Reference::MakeOptimizer adamw(double lr, double eps, double weight_decay) {
  return [=](std::vector<at::Tensor> masters) {
    return std::make_unique<torch::optim::AdamW>(std::move(masters),
                                                 torch::optim::AdamWOptions(lr).eps(eps).weight_decay(weight_decay));
  };
}

}  // namespace ballast::testing
