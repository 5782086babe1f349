#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <nlohmann/json.hpp>
#include <vector>

namespace ballast::testing {

/// One micro-batch and the way that it takes through the model.
struct Sample {
  at::Tensor tokens;  // int64 [2, 3]
  at::Tensor target;  // fp32 [2, 3, 11]
  int expert = 0;     // which of the two experts it goes through
  bool aux = false;   // whether it uses the auxiliary layer
};
/// A pure function of its arguments. Expert 1 runs on rank 0 alone and in odd steps alone; the auxiliary layer rests in
/// every third step.
Sample sample(int step, int micro_batch, int rank, c10::Device device);

/// Every awkward kind of parameter in one small model: odd sizes, a table tied to the output layer, frozen layers,
/// layers that rest in some windows or run on one rank only, one that nothing ever uses, and zero-dimensional and empty
/// ones. Weights are a pure function of the seed.
class Zoo : public torch::nn::Module {
 public:
  explicit Zoo(std::int64_t seed = 1);

  /// Mean squared error, fp32 scalar.
  at::Tensor loss(const Sample& sample);
  /// Runs the blocks in another order than loss() does and returns the activations.
  at::Tensor backwards_through_blocks(const Sample& sample);

  /// What a configuration must say about the model: its experts are one leaf unit.
  static nlohmann::json leaf_settings();

 private:
  at::Tensor block(std::size_t i, const at::Tensor& h);

  torch::nn::Embedding embedding_{nullptr};
  torch::nn::ModuleList up_, down_, experts_;
  torch::nn::Linear frozen_{nullptr}, aux_{nullptr}, unused_{nullptr};
  at::Tensor gain_, nothing_;
};

}  // namespace ballast::testing
