#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ballast/models/gpt_options.h"

/// Decoders in plain LibTorch, norm before each sub-layer: the GPT-2 family (Radford et al., 2019, "Language Models are
/// Unsupervised Multitask Learners") with learned positions, GELU (tanh form) and an output head tied to the token
/// embedding, and the Llama family (Touvron et al., 2023, "LLaMA: Open and Efficient Foundation Language Models") with
/// root-mean-square norms, rotary positions, a gated MLP and fewer heads of keys. Nothing here knows of the engine; a
/// module of your own is trained in the same way.
namespace ballast::models {

/// Layer norm, or division by the root of the mean square (Zhang and Sennrich, 2019). x: [..., width], same out.
struct NormImpl : torch::nn::Module {
  explicit NormImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight, bias;  // [width]; bias is undefined where there is none
  const NormKind kind;
  const double eps;
};
TORCH_MODULE(Norm);

/// Cosines and sines of rotary positions, each [length, head width], the second half like the first; undefined where
/// positions are learned.
struct Rotation {
  at::Tensor cos, sin;
};

/// Causal self-attention. x: [batch, length, width], same out. Rows of qkv: queries by head, keys by key head, values.
struct AttentionImpl : torch::nn::Module {
  explicit AttentionImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

  torch::nn::Linear qkv{nullptr}, projection{nullptr};
  torch::nn::Dropout dropout{nullptr};
  const std::int64_t heads, key_heads;
};
TORCH_MODULE(Attention);

/// width -> hidden -> width with a GELU between, or gated: silu(gate) * up, where the rows of expand are gate, then up.
/// x: [batch, length, width], same out.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear expand{nullptr}, projection{nullptr};
  torch::nn::Dropout dropout{nullptr};
  const MlpKind kind;
};
TORCH_MODULE(Mlp);

/// x + attention(norm(x)), then x + mlp(norm(x)). The engine makes each block a unit.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& options);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

  Norm attention_norm{nullptr}, mlp_norm{nullptr};
  Attention attention{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Block);

/// Runs one block on its input; what activation checkpointing puts around it (see GptImpl::set_block_runner).
using BlockRunner =
    std::function<at::Tensor(const std::function<at::Tensor(const at::Tensor&)>& block, const at::Tensor& x)>;

struct GptImpl : torch::nn::Module {
  /// Weights come from a generator seeded with `options.seed` alone: the same seed gives the same weights whatever the
  /// process drew before. Throws ConfigError on options that contradict each other.
  explicit GptImpl(const GptOptions& options);

  /// tokens: int64 [batch, length], 1 <= length <= context, each in [0, vocabulary). Returns logits
  /// [batch, length, vocabulary] in the weights' dtype. Throws UseError on another shape.
  at::Tensor forward(const at::Tensor& tokens);

  /// Mean cross-entropy in nats over all positions, a fp32 scalar (also with half-precision weights).
  /// inputs, targets: int64 [batch, length]; targets[b][i] is the token that follows inputs[b][i].
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& targets);

  /// Replaces the plain call of each block, for instance by one that drops the activations and computes them again in
  /// backward. An empty function restores the plain call.
  void set_block_runner(BlockRunner runner) { block_runner_ = std::move(runner); }

  const GptOptions options;
  torch::nn::Embedding token_embedding{nullptr}, position_embedding{nullptr};  // the second is null where rotary
  torch::nn::Dropout dropout{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  Norm final_norm{nullptr};
  torch::nn::Linear head{nullptr};  // null where it is tied

 private:
  void initialise();
  Rotation rotation(std::int64_t length, const at::Tensor& like) const;

  BlockRunner block_runner_;
};
TORCH_MODULE(Gpt);

}  // namespace ballast::models
