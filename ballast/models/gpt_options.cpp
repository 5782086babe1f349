#include "ballast/models/gpt_options.h"

#include "ballast/base/error.h"
#include "ballast/base/math.h"

namespace ballast::models {

std::int64_t GptOptions::hidden_width() const {
  if (mlp_width > 0) return mlp_width;
  return mlp == MlpKind::kGelu ? 4 * width : round_up(ceil_div(8 * width, 3), 64);
}

void check(const GptOptions& options) {
  const auto positive = [](const char* name, std::int64_t value) {
    if (value < 1) throw ConfigError("models.gpt", "must be at least 1 (", name, " = ", value, ")");
  };
  positive("vocabulary", options.vocabulary);
  positive("context", options.context);
  positive("layers", options.layers);
  positive("width", options.width);
  positive("heads", options.heads);
  if (options.width % options.heads != 0)
    throw ConfigError("models.gpt", "width must be a multiple of heads (width = ", options.width,
                      ", heads = ", options.heads, ")");
  if (options.key_heads < 0 || options.mlp_width < 0)
    throw ConfigError("models.gpt", "must not be negative (key_heads = ", options.key_heads,
                      ", mlp_width = ", options.mlp_width, ")");
  if (options.key_heads > 0 && options.heads % options.key_heads != 0)
    throw ConfigError("models.gpt", "heads must be a multiple of key_heads (heads = ", options.heads,
                      ", key_heads = ", options.key_heads, ")");
  if (options.positions == PositionKind::kRotary && options.head_width() % 2 != 0)
    throw ConfigError("models.gpt", "rotary positions need heads of an even width (width = ", options.width,
                      ", heads = ", options.heads, ")");
  if (!(options.rope_theta > 0 && options.norm_eps > 0))
    throw ConfigError("models.gpt", "must be greater than 0 (rope_theta = ", options.rope_theta,
                      ", norm_eps = ", options.norm_eps, ")");
  if (!(options.dropout >= 0 && options.dropout < 1))
    throw ConfigError("models.gpt", "must be in [0, 1) (dropout = ", options.dropout, ")");
}

std::vector<ParameterShape> parameter_shapes(const GptOptions& options) {
  check(options);
  const std::int64_t width = options.width, hidden = options.hidden_width();
  std::vector<ParameterShape> shapes;
  const auto norm = [&](const std::string& name) {
    shapes.push_back({name + ".weight", {width}});
    if (options.bias && options.norm == NormKind::kLayer) shapes.push_back({name + ".bias", {width}});
  };
  const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    shapes.push_back({name + ".weight", {out, in}});
    if (options.bias) shapes.push_back({name + ".bias", {out}});
  };
  shapes.push_back({"token_embedding.weight", {options.vocabulary, width}});
  if (options.positions == PositionKind::kLearned)
    shapes.push_back({"position_embedding.weight", {options.context, width}});
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    const std::string block = "blocks." + std::to_string(layer) + ".";
    norm(block + "attention_norm");
    linear(block + "attention.qkv", width, width + 2 * options.key_width());
    linear(block + "attention.projection", width, width);
    norm(block + "mlp_norm");
    linear(block + "mlp.expand", width, options.mlp == MlpKind::kSwiglu ? 2 * hidden : hidden);
    linear(block + "mlp.projection", hidden, width);
  }
  norm("final_norm");
  if (!options.tied_head) shapes.push_back({"head.weight", {options.vocabulary, width}});
  return shapes;
}

}  // namespace ballast::models
