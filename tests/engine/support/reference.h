#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ballast::testing {

/// One process of torch::optim on the whole batch: the answer that every engine must give. The model computes in
/// `compute`; the optimizer works on fp32 masters, and the gradients of a window add up in fp32.
class Reference {
 public:
  using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

  /// model: fp32; converted here.
  Reference(std::shared_ptr<torch::nn::Module> model, c10::ScalarType compute, const MakeOptimizer& make_optimizer);

  /// Adds the gradient of root * loss to the window.
  void backward(const at::Tensor& loss, double root = 1);
  /// Divides the window's sum, clips its norm (clip > 0), steps, and starts the next window. Returns the norm before
  /// clipping.
  double step(double divisor, double clip = 0);

  /// fp32 masters of the trainable parameters, by every name.
  std::map<std::string, at::Tensor> masters() const;

 private:
  struct Weight {
    at::Tensor compute, master, sum;  // sum: undefined while the window has no gradient for it
  };
  std::vector<Weight> weights_;  // tied parameters once
  std::map<std::string, std::size_t> by_name_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// torch::optim::AdamW with these values.
Reference::MakeOptimizer adamw(double lr, double eps, double weight_decay);

}  // namespace ballast::testing
