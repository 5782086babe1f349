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

/// x: [batch, heads, length, head width]. Turns the pair of elements i and i + half of a head by the position's i-th
/// angle (Su et al., 2021, "RoFormer"; halves instead of neighbours, as Llama's files have them).
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  const auto halves = x.chunk(2, -1);
  return x * rotation.cos + at::cat({-halves[1], halves[0]}, -1) * rotation.sin;
}

}  // namespace

NormImpl::NormImpl(const GptOptions& options) : kind(options.norm), eps(options.norm_eps) {
  weight = register_parameter("weight", torch::ones({options.width}));
  if (options.bias && kind == NormKind::kLayer) bias = register_parameter("bias", torch::zeros({options.width}));
}

at::Tensor NormImpl::forward(const at::Tensor& x) {
  const at::IntArrayRef shape = weight.sizes();
  return kind == NormKind::kRms ? at::rms_norm(x, shape, weight, eps) : at::layer_norm(x, shape, weight, bias, eps);
}

AttentionImpl::AttentionImpl(const GptOptions& options)
    : heads(options.heads), key_heads(options.key_width() / options.head_width()) {
  const auto linear = [&](std::int64_t out) {
    return nn::Linear(nn::LinearOptions(options.width, out).bias(options.bias));
  };
  qkv = register_module("qkv", linear(options.width + 2 * options.key_width()));
  projection = register_module("projection", linear(options.width));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
  const auto by_head = project(qkv, x).view({batch, length, heads + 2 * key_heads, width / heads}).transpose(1, 2);
  auto split = by_head.split_with_sizes({heads, key_heads, key_heads}, 1);
  if (rotation.cos.defined())
    for (const int i : {0, 1}) split[i] = rotate(split[i], rotation);
  const double p = is_training() ? dropout->options.p() : 0;
  const auto mixed =
      at::scaled_dot_product_attention(split[0], split[1], split[2], /*attn_mask=*/{}, p, /*is_causal=*/true,
                                       /*scale=*/std::nullopt, /*enable_gqa=*/key_heads != heads);
  return dropout(project(projection, mixed.transpose(1, 2).reshape({batch, length, width})));
}

MlpImpl::MlpImpl(const GptOptions& options) : kind(options.mlp) {
  const std::int64_t hidden = options.hidden_width(), expanded = kind == MlpKind::kSwiglu ? 2 * hidden : hidden;
  expand = register_module("expand", nn::Linear(nn::LinearOptions(options.width, expanded).bias(options.bias)));
  projection = register_module("projection", nn::Linear(nn::LinearOptions(hidden, options.width).bias(options.bias)));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  const at::Tensor expanded = project(expand, x);
  if (kind == MlpKind::kGelu) return dropout(project(projection, at::gelu(expanded, "tanh")));
  const auto halves = expanded.chunk(2, -1);
  return dropout(project(projection, at::silu(halves[0]) * halves[1]));
}

BlockImpl::BlockImpl(const GptOptions& options) {
  attention_norm = register_module("attention_norm", Norm(options));
  attention = register_module("attention", Attention(options));
  mlp_norm = register_module("mlp_norm", Norm(options));
  mlp = register_module("mlp", Mlp(options));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  const at::Tensor mixed = x + attention(attention_norm(x), rotation);
  return mixed + mlp(mlp_norm(mixed));
}

GptImpl::GptImpl(const GptOptions& from) : options(from) {
  check(options);
  token_embedding = register_module("token_embedding", nn::Embedding(options.vocabulary, options.width));
  if (options.positions == PositionKind::kLearned)
    position_embedding = register_module("position_embedding", nn::Embedding(options.context, options.width));
  dropout = register_module("dropout", nn::Dropout(options.dropout));
  blocks = register_module("blocks", nn::ModuleList());
  for (std::int64_t layer = 0; layer < options.layers; ++layer) blocks->push_back(Block(options));
  final_norm = register_module("final_norm", Norm(options));
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

// Computed anew in each forward, a few small operators: a buffer would be rounded with the weights, and saved with
// them.
Rotation GptImpl::rotation(std::int64_t length, const at::Tensor& like) const {
  if (options.positions == PositionKind::kLearned) return {};
  const torch::NoGradGuard no_grad;
  const at::TensorOptions fp32 = at::TensorOptions(at::kFloat).device(like.device());
  const std::int64_t head = options.head_width();
  const at::Tensor rates = at::pow(options.rope_theta, at::arange(0, head, 2, fp32) / head).reciprocal();
  const at::Tensor angles = at::outer(at::arange(length, fp32), rates).repeat({1, 2});
  return {angles.cos().to(like.scalar_type()), angles.sin().to(like.scalar_type())};
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  if (tokens.dim() != 2 || tokens.size(1) < 1 || tokens.size(1) > options.context)
    throw UseError("models.gpt.forward", "tokens must be [batch, 1 to ", options.context, "] (got ", tokens.sizes(),
                   ")");
  const std::int64_t length = tokens.size(1);
  at::Tensor x = token_embedding(tokens);
  if (!position_embedding.is_empty()) x = x + position_embedding->weight.narrow(0, 0, length);
  x = dropout(x);
  const Rotation positions = rotation(length, x);
  for (const auto& module : *blocks) {
    auto block = std::static_pointer_cast<BlockImpl>(module);
    // The runner may keep the function until backward, so it owns the block.
    x = block_runner_
            ? block_runner_([block, positions](const at::Tensor& in) { return block->forward(in, positions); }, x)
            : block->forward(x, positions);
  }
  return at::linear(final_norm(x), head.is_empty() ? token_embedding->weight : head->weight);
}

at::Tensor GptImpl::loss(const at::Tensor& inputs, const at::Tensor& targets) {
  const at::Tensor logits = forward(inputs);
  return at::cross_entropy_loss(logits.flatten(0, 1).to(at::kFloat), targets.flatten());
}

}  // namespace ballast::models
