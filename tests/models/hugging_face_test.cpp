#include "ballast/models/hugging_face.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "tests/models/small.h"

namespace ballast::models {
namespace {

using nlohmann::json;
using Shape = std::vector<std::int64_t>;

std::map<std::string, ForeignTensor> by_name(const GptOptions& options) {
  std::map<std::string, ForeignTensor> tensors;
  for (const ForeignTensor& tensor : foreign_tensors(options)) tensors[tensor.name] = tensor;
  return tensors;
}

std::string error_of(const json& config) {
  try {
    options_of_foreign(config, "config.json");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no error";
}

json changed(json config, const char* key, json value) {
  config[key] = std::move(value);
  return config;
}

// What a file has covers every row of every parameter exactly once, in the parameters' order.
TEST(HuggingFace, TensorsCoverTheModel) {
  GptOptions untied = small(), tied_llama = small_llama(), biased = small_llama();
  untied.tied_head = false;
  tied_llama.tied_head = true;
  biased.bias = true;
  for (const GptOptions& options : {small(), untied, small_llama(), tied_llama, biased}) {
    const auto tensors = foreign_tensors(options);
    std::size_t at = 0;
    for (const ParameterShape& shape : parameter_shapes(options)) {
      std::int64_t rows = 0;
      for (; at < tensors.size() && tensors[at].parameter == shape.name; ++at) {
        EXPECT_EQ(tensors[at].first_row, rows) << tensors[at].name;
        rows += tensors[at].rows;
        Shape part = shape.sizes;
        part[0] = tensors[at].rows;
        if (tensors[at].transposed) std::swap(part[0], part[1]);
        EXPECT_EQ(tensors[at].shape, part) << tensors[at].name;
      }
      EXPECT_EQ(rows, shape.sizes[0]) << shape.name;
    }
    EXPECT_EQ(at, tensors.size());
    EXPECT_EQ(by_name(options).size(), tensors.size());
  }
}

TEST(HuggingFace, Gpt2sLinearLayersLieTheOtherWayRound) {
  const auto tensors = by_name(small());
  EXPECT_EQ(tensors.size(), 2u + 2 * 12 + 2);
  EXPECT_TRUE(tensors.at("transformer.h.1.attn.c_attn.weight").transposed);
  EXPECT_EQ(tensors.at("transformer.h.1.attn.c_attn.weight").shape, (Shape{12, 36}));
  EXPECT_EQ(tensors.at("transformer.h.1.mlp.c_fc.weight").shape, (Shape{12, 48}));
  EXPECT_EQ(tensors.at("transformer.h.0.mlp.c_proj.weight").parameter, "blocks.0.mlp.projection.weight");
  EXPECT_EQ(tensors.at("transformer.h.0.attn.c_proj.bias").shape, Shape{12});
  for (const char* name : {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"})
    EXPECT_FALSE(tensors.at(name).transposed) << name;
  EXPECT_FALSE(tensors.contains("lm_head.weight"));
}

TEST(HuggingFace, ALlamasFusedLayersAreSeveral) {
  const auto tensors = by_name(small_llama());
  EXPECT_EQ(tensors.size(), 1u + 2 * 9 + 2);
  const auto rows = [&](const std::string& name) {
    const ForeignTensor& tensor = tensors.at("model.layers.0." + name + ".weight");
    return std::tuple(tensor.parameter, tensor.first_row, tensor.rows);
  };
  EXPECT_EQ(rows("self_attn.q_proj"), std::tuple("blocks.0.attention.qkv.weight", 0, 24));
  EXPECT_EQ(rows("self_attn.k_proj"), std::tuple("blocks.0.attention.qkv.weight", 24, 12));
  EXPECT_EQ(rows("self_attn.v_proj"), std::tuple("blocks.0.attention.qkv.weight", 36, 12));
  EXPECT_EQ(rows("mlp.gate_proj"), std::tuple("blocks.0.mlp.expand.weight", 0, 20));
  EXPECT_EQ(rows("mlp.up_proj"), std::tuple("blocks.0.mlp.expand.weight", 20, 20));
  EXPECT_EQ(tensors.at("lm_head.weight").parameter, "head.weight");
}

TEST(HuggingFace, OptionsSurviveTheirConfig) {
  GptOptions gpt = small(), llama = small_llama();
  gpt.dropout = 0.25;
  gpt.mlp_width = 7;
  gpt.tied_head = false;
  gpt.norm_eps = 1e-4;
  llama.bias = true;
  llama.tied_head = true;
  for (const GptOptions& options : {small(), gpt, small_llama(), llama}) {
    const json config = foreign_config(options, "float32");
    const GptOptions back = options_of_foreign(json::parse(config.dump()), "config.json");
    EXPECT_EQ(foreign_config(back, "float32"), config);
    EXPECT_EQ(back.norm, options.norm);
    EXPECT_EQ(back.heads, options.heads);
    EXPECT_EQ(back.key_width(), options.key_width());
    EXPECT_EQ(back.bias, options.bias);
    EXPECT_EQ(back.rope_theta, options.rope_theta);
    EXPECT_EQ(back.hidden_width(), options.hidden_width());
    EXPECT_EQ(back.tied_head, options.tied_head);
  }
}

TEST(HuggingFace, ReadsTheOlderFormsOfALlamasConfig) {
  const json sizes = {{"model_type", "llama"},  {"vocab_size", 32},         {"num_hidden_layers", 1},
                      {"hidden_size", 8},       {"num_attention_heads", 2}, {"intermediate_size", 12},
                      {"rope_theta", 500000.0}, {"rope_scaling", nullptr}};
  const GptOptions options = options_of_foreign(sizes, "config.json");
  EXPECT_EQ(options.rope_theta, 500000);
  EXPECT_EQ(options.key_width(), 8);
  EXPECT_EQ(options.norm_eps, 1e-6);
  EXPECT_EQ(options.context, 2048);
  EXPECT_FALSE(options.tied_head);
  EXPECT_FALSE(options.bias);
}

TEST(HuggingFace, RefusesWhatItCannotCompute) {
  const json gpt = foreign_config(small(), "float32"), llama = foreign_config(small_llama(), "float32");
  EXPECT_EQ(error_of(changed(gpt, "activation_function", "relu")),
            "[models.hugging_face] can't be taken (config.json; activation_function = \"relu\"; want \"gelu_new\")");
  EXPECT_EQ(error_of(changed(llama, "rope_parameters", {{"rope_type", "llama3"}, {"rope_theta", 1e4}})),
            "[models.hugging_face] can't be taken (config.json; rope_parameters = "
            "{\"rope_theta\":10000.0,\"rope_type\":\"llama3\"}; want \"rope_type\": \"default\")");
  EXPECT_NE(error_of(changed(llama, "rope_scaling", {{"type", "linear"}, {"factor", 2}})).find("rope_scaling"),
            std::string::npos);
  for (const auto& [key, value] : std::vector<std::pair<const char*, json>>{{"head_dim", 128},
                                                                            {"mlp_bias", true},
                                                                            {"hidden_size", "24"},
                                                                            {"hidden_size", 0},
                                                                            {"hidden_size", 1e30},
                                                                            {"num_hidden_layers", nullptr},
                                                                            {"tie_word_embeddings", 1},
                                                                            {"attention_dropout", 0.1},
                                                                            {"model_type", "mistral"}})
    EXPECT_NE(error_of(changed(llama, key, value)).find(std::string(key) + " = "), std::string::npos)
        << key << " = " << value << ": " << error_of(changed(llama, key, value));
  EXPECT_NE(error_of(changed(gpt, "attn_pdrop", 0.3)).find("attn_pdrop = 0.3; want 0.0"), std::string::npos);
  EXPECT_EQ(error_of(changed(gpt, "n_head", 5)),
            "[models.hugging_face] can't be taken (config.json; [models.gpt] width must be a multiple of heads "
            "(width = 12, heads = 5))");
  EXPECT_NE(error_of(json::array()).find("not an object (config.json)"), std::string::npos);
}

TEST(HuggingFace, AModelOfNeitherFamilyHasNoFile) {
  GptOptions mixed = small();
  mixed.positions = PositionKind::kRotary;
  EXPECT_THROW(foreign_tensors(mixed), ConfigError);
  GptOptions shared = small();
  shared.heads = 6;
  shared.key_heads = 2;
  EXPECT_THROW(foreign_config(shared, "float32"), ConfigError);
}

TEST(HuggingFace, NamesOfABareDecoderAreCompleted) {
  EXPECT_EQ(foreign_name("h.0.ln_1.weight", small()), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(foreign_name("transformer.wte.weight", small()), "transformer.wte.weight");
  EXPECT_EQ(foreign_name("lm_head.weight", small_llama()), "lm_head.weight");
  EXPECT_EQ(foreign_name("norm.weight", small_llama()), "model.norm.weight");
  EXPECT_EQ(foreign_name("h.3.attn.bias", small()), std::nullopt);
  EXPECT_EQ(foreign_name("model.layers.0.self_attn.rotary_emb.inv_freq", small_llama()), std::nullopt);
}

}  // namespace
}  // namespace ballast::models
