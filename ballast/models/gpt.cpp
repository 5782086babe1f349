#include "ballast/models/gpt.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>

#include "ballast/base/error.h"

namespace ballast::models {

namespace nn = torch::nn;

namespace {

// On rows: with two dimensions the bias is added inside the matrix product, with three in a pass of its own (measured
// on an H200: a tenth of a step).
at::Tensor project(const nn::Linear& linear, const at::Tensor& x) {
  at::DimVector shape(x.sizes());
  shape.back() = linear->options.out_features();
  return at::linear(x.reshape({-1, x.size(-1)}), linear->weight, linear->bias).view(shape);
}

}  // namespace

AttentionImpl::AttentionImpl(const GptOptions& options) : heads(options.heads) {
  qkv = register_module("qkv", nn::Linear(options.width, 3 * options.width));
  projection = register_module("projection", nn::Linear(options.width, options.width));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x) {
  const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto split = project(qkv, x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
  const double p = is_training() ? dropout->options.p() : 0;
  const auto mixed =
      at::scaled_dot_product_attention(split[0], split[1], split[2], /*attn_mask=*/{}, p, /*is_causal=*/true);
  return dropout(project(projection, mixed.transpose(1, 2).reshape({batch, length, width})));
}

MlpImpl::MlpImpl(const GptOptions& options) {
  expand = register_module("expand", nn::Linear(options.width, 4 * options.width));
  projection = register_module("projection", nn::Linear(4 * options.width, options.width));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  return dropout(project(projection, at::gelu(project(expand, x), "tanh")));
}

BlockImpl::BlockImpl(const GptOptions& options) {
  const nn::LayerNormOptions norm({options.width});
  attention_norm = register_module("attention_norm", nn::LayerNorm(norm));
  attention = register_module("attention", Attention(options));
  mlp_norm = register_module("mlp_norm", nn::LayerNorm(norm));
  mlp = register_module("mlp", Mlp(options));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor mixed = x + attention(attention_norm(x));
  return mixed + mlp(mlp_norm(mixed));
}

GptImpl::GptImpl(const GptOptions& from) : options(from) {
  check(options);
  token_embedding = register_module("token_embedding", nn::Embedding(options.vocabulary, options.width));
  position_embedding = register_module("position_embedding", nn::Embedding(options.context, options.width));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
  blocks = register_module("blocks", nn::ModuleList());
  for (std::int64_t layer = 0; layer < options.layers; ++layer) blocks->push_back(Block(options));
  final_norm = register_module("final_norm", nn::LayerNorm(nn::LayerNormOptions({options.width})));
  if (!options.tied_head)
    head = register_module("head", nn::Linear(nn::LinearOptions(options.width, options.vocabulary).bias(false)));
  initialise();
}

/// Weights from N(0, 0.02^2), biases 0, norms 1 and 0; the projections onto the residual path are narrower by
/// sqrt(2 layers), since each of 2 layers' outputs adds its variance to the path (section 2.3 of the paper).
void GptImpl::initialise() {
  constexpr double kStd = 0.02;
  torch::NoGradGuard no_grad;
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const double residual_std = kStd / std::sqrt(2.0 * static_cast<double>(options.layers));
  for (auto& parameter : named_parameters()) {
    const std::string& name = parameter.key();
    at::Tensor& value = parameter.value();
    if (name.ends_with("bias")) {
      value.zero_();
    } else if (name.find("norm") != std::string::npos) {
      value.fill_(1);
    } else {
      value.normal_(0, name.ends_with("projection.weight") ? residual_std : kStd, generator);
    }
  }
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  if (tokens.dim() != 2 || tokens.size(1) < 1 || tokens.size(1) > options.context)
    throw UseError("models.gpt.forward", "tokens must be [batch, 1 to ", options.context, "] (got ", tokens.sizes(),
                   ")");
  at::Tensor x = token_embedding(tokens) + position_embedding->weight.narrow(0, 0, tokens.size(1));
  x = dropout(x);
  for (const auto& module : *blocks) {
    auto block = std::static_pointer_cast<BlockImpl>(module);
    // The runner may keep the function until backward, so it owns the block.
    x = block_runner_ ? block_runner_([block](const at::Tensor& in) { return block->forward(in); }, x)
                      : block->forward(x);
  }
  return at::linear(final_norm(x), head.is_empty() ? token_embedding->weight : head->weight);
}

at::Tensor GptImpl::loss(const at::Tensor& inputs, const at::Tensor& targets) {
  const at::Tensor logits = forward(inputs);
  return at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
}

}  // namespace ballast::models
