#include "ballast/models/gpt_options.h"

#include "ballast/base/error.h"

namespace ballast::models {

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
  if (!(options.dropout >= 0 && options.dropout < 1))
    throw ConfigError("models.gpt", "must be in [0, 1) (dropout = ", options.dropout, ")");
}

std::vector<ParameterShape> parameter_shapes(const GptOptions& options) {
  check(options);
  const std::int64_t width = options.width;
  std::vector<ParameterShape> shapes;
  const auto norm = [&](const std::string& name) {
    shapes.push_back({name + ".weight", {width}});
    shapes.push_back({name + ".bias", {width}});
  };
  const auto linear = [&](const std::string& name, std::int64_t in, std::int64_t out) {
    shapes.push_back({name + ".weight", {out, in}});
    shapes.push_back({name + ".bias", {out}});
  };
  shapes.push_back({"token_embedding.weight", {options.vocabulary, width}});
  shapes.push_back({"position_embedding.weight", {options.context, width}});
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    const std::string block = "blocks." + std::to_string(layer) + ".";
    norm(block + "attention_norm");
    linear(block + "attention.qkv", width, 3 * width);
    linear(block + "attention.projection", width, width);
    norm(block + "mlp_norm");
    linear(block + "mlp.expand", width, 4 * width);
    linear(block + "mlp.projection", 4 * width, width);
  }
  norm("final_norm");
  if (!options.tied_head) shapes.push_back({"head.weight", {options.vocabulary, width}});
  return shapes;
}

}  // namespace ballast::models
