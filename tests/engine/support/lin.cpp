#include "tests/engine/support/lin.h"

namespace ballast::testing {

Lin::Lin(const std::vector<Named>& parameters) {
  for (const Named& named : parameters) {
    const auto [owner, leaf_name] = place(named.name, true);
    owner->register_parameter(leaf_name, at::full(named.shape, named.start), named.trainable);
  }
}

std::pair<Lin*, std::string> Lin::place(const std::string& name, bool create) {
  const std::size_t dot = name.find('.');
  if (dot == std::string::npos) return {this, name};
  const std::string child = name.substr(0, dot);
  if (create && !named_children().contains(child)) register_module(child, std::shared_ptr<Lin>(new Lin));
  return std::static_pointer_cast<Lin>(named_children()[child])->place(name.substr(dot + 1), create);
}

at::Tensor& Lin::parameter(const std::string& name) {
  const auto [owner, leaf_name] = place(name, false);
  return owner->parameters_[leaf_name];
}

void Lin::tie(const std::string& existing, const std::string& second) {
  at::Tensor tensor = parameter(existing);
  const auto [owner, leaf_name] = place(second, true);
  owner->register_parameter(leaf_name, tensor);
}

std::shared_ptr<Lin> lin(std::int64_t n, double start) { return lin({{"p", {n}, start}}); }
std::shared_ptr<Lin> lin(const std::vector<Named>& parameters) { return std::make_shared<Lin>(parameters); }

at::Tensor weighed_sum(const at::Tensor& parameter, const at::Tensor& coefficients) {
  return (parameter * coefficients.to(parameter.options())).sum();
}

at::Tensor weighed_sum(const at::Tensor& parameter, double coefficient) {
  return weighed_sum(parameter, at::full(parameter.sizes(), coefficient, parameter.options()));
}

at::Tensor loss_of(Lin& model, const Pull& pull) {
  at::Tensor loss;
  for (const auto& [name, coefficient] : pull) {
    const at::Tensor term = weighed_sum(model.parameter(name), coefficient);
    loss = loss.defined() ? loss + term : term;
  }
  return loss;
}

}  // namespace ballast::testing
