#include "ballast/models/hugging_face.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "ballast/base/error.h"

namespace ballast::models {
namespace {

using nlohmann::json;

constexpr const char* kOperation = "models.hugging_face";

enum class Family : std::uint8_t { kGpt2, kLlama };

Family family_of(const GptOptions& o) {
  const bool all_keys = o.key_width() == o.width;
  if (o.norm == NormKind::kLayer && o.positions == PositionKind::kLearned && o.mlp == MlpKind::kGelu && o.bias &&
      all_keys)
    return Family::kGpt2;
  if (o.norm == NormKind::kRms && o.positions == PositionKind::kRotary && o.mlp == MlpKind::kSwiglu)
    return Family::kLlama;
  throw ConfigError(kOperation,
                    "the model is neither a GPT-2 nor a Llama, so that no file of theirs describes it (want norm "
                    "\"layer\", positions \"learned\", mlp \"gelu\", bias true and keys for every head; or \"rms\", "
                    "\"rotary\" and \"swiglu\")");
}

/// A module's name there; several: rows of ours, in order.
struct Part {
  std::string name;
  std::int64_t rows;
};

std::vector<Part> parts_of(const std::string& module, const GptOptions& o, Family family) {
  const bool gpt2 = family == Family::kGpt2;
  const std::int64_t width = o.width, keys = o.key_width(), hidden = o.hidden_width();
  if (module == "token_embedding") return {{gpt2 ? "transformer.wte" : "model.embed_tokens", o.vocabulary}};
  if (module == "position_embedding") return {{"transformer.wpe", o.context}};
  if (module == "final_norm") return {{gpt2 ? "transformer.ln_f" : "model.norm", width}};
  if (module == "head") return {{"lm_head", o.vocabulary}};
  constexpr std::size_t kBlocks = sizeof "blocks." - 1;
  const std::size_t dot = module.find('.', kBlocks);
  const std::string block = (gpt2 ? "transformer.h." : "model.layers.") + module.substr(kBlocks, dot - kBlocks + 1);
  const std::string inner = module.substr(dot + 1);
  if (inner == "attention_norm") return {{block + (gpt2 ? "ln_1" : "input_layernorm"), width}};
  if (inner == "mlp_norm") return {{block + (gpt2 ? "ln_2" : "post_attention_layernorm"), width}};
  if (inner == "attention.projection") return {{block + (gpt2 ? "attn.c_proj" : "self_attn.o_proj"), width}};
  if (inner == "mlp.projection") return {{block + (gpt2 ? "mlp.c_proj" : "mlp.down_proj"), width}};
  if (inner == "attention.qkv") {
    if (gpt2) return {{block + "attn.c_attn", 3 * width}};
    return {
        {block + "self_attn.q_proj", width}, {block + "self_attn.k_proj", keys}, {block + "self_attn.v_proj", keys}};
  }
  if (gpt2) return {{block + "mlp.c_fc", hidden}};
  return {{block + "mlp.gate_proj", hidden}, {block + "mlp.up_proj", hidden}};
}

/// Reads values of a config.json, with its name in every complaint.
class Values {
 public:
  Values(const json& object, const std::string& file) : object_(object), file_(file) {
    if (!object_.is_object()) throw ConfigError(kOperation, "not an object (", file_, ")");
  }

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  std::int64_t integer(const char* key) const {
    if (!has(key)) fail(key, "a whole number from 1 to 2^31");
    return integer(key, 0);
  }
  std::int64_t integer(const char* key, std::int64_t fallback) const {
    if (!has(key)) return fallback;
    constexpr std::int64_t kMost = std::int64_t{1} << 31;
    const json& value = object_.at(key);
    if (!value.is_number_integer() || value.get<double>() < 1 || value.get<double>() > kMost)
      fail(key, "a whole number from 1 to 2^31");
    return value.get<std::int64_t>();
  }
  double number(const char* key, double fallback) const {
    if (has(key) && !object_.at(key).is_number()) fail(key, "a number");
    return has(key) ? object_.at(key).get<double>() : fallback;
  }
  bool flag(const char* key, bool fallback) const {
    if (has(key) && !object_.at(key).is_boolean()) fail(key, "true or false");
    return has(key) ? object_.at(key).get<bool>() : fallback;
  }
  std::string text(const char* key, const std::string& fallback) const {
    if (has(key) && !object_.at(key).is_string()) fail(key, "a text");
    return has(key) ? object_.at(key).get<std::string>() : fallback;
  }
  /// What a Gpt computes in one way only.
  template <class Value>
  void only(const char* key, const Value& given, const Value& want) const {
    if (given != want) fail(key, json(want).dump());
  }
  const json& operator[](const char* key) const { return object_.at(key); }
  [[noreturn]] void fail(const char* key, const std::string& want) const {
    throw ConfigError(kOperation, "can't be taken (", file_, "; ", key, " = ",
                      has(key) ? object_.at(key).dump(-1, ' ', true, json::error_handler_t::replace) : "nothing",
                      "; want ", want, ")");
  }

 private:
  const json& object_;
  const std::string& file_;
};

GptOptions gpt2_of(const Values& values) {
  GptOptions options;
  options.vocabulary = values.integer("vocab_size");
  options.context = values.integer("n_positions");
  options.layers = values.integer("n_layer");
  options.width = values.integer("n_embd");
  options.heads = values.integer("n_head");
  options.mlp_width = values.integer("n_inner", 0);
  options.norm_eps = values.number("layer_norm_epsilon", 1e-5);
  options.tied_head = values.flag("tie_word_embeddings", true);
  options.dropout = values.number("resid_pdrop", 0.1);
  for (const char* key : {"embd_pdrop", "attn_pdrop"}) values.only(key, values.number(key, 0.1), options.dropout);
  const std::string activation = values.text("activation_function", "gelu_new");
  if (activation != "gelu_pytorch_tanh") values.only<std::string>("activation_function", activation, "gelu_new");
  values.only("scale_attn_weights", values.flag("scale_attn_weights", true), true);
  values.only("scale_attn_by_inverse_layer_idx", values.flag("scale_attn_by_inverse_layer_idx", false), false);
  values.only("add_cross_attention", values.flag("add_cross_attention", false), false);
  return options;
}

GptOptions llama_of(const Values& values, const std::string& file) {
  GptOptions options;
  options.norm = NormKind::kRms;
  options.positions = PositionKind::kRotary;
  options.mlp = MlpKind::kSwiglu;
  options.vocabulary = values.integer("vocab_size");
  options.context = values.integer("max_position_embeddings", 2048);
  options.layers = values.integer("num_hidden_layers");
  options.width = values.integer("hidden_size");
  options.heads = values.integer("num_attention_heads");
  options.key_heads = values.integer("num_key_value_heads", options.heads);
  options.mlp_width = values.integer("intermediate_size");
  options.norm_eps = values.number("rms_norm_eps", 1e-6);
  options.tied_head = values.flag("tie_word_embeddings", false);
  options.bias = values.flag("attention_bias", false);
  values.only("mlp_bias", values.flag("mlp_bias", false), options.bias);
  values.only<std::string>("hidden_act", values.text("hidden_act", "silu"), "silu");
  values.only("head_dim", values.integer("head_dim", options.head_width()), options.head_width());
  values.only("attention_dropout", values.number("attention_dropout", 0), 0.0);
  options.rope_theta = values.number("rope_theta", 10000);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {  // the older name, the newer one
    if (!values.has(key)) continue;
    const Values rope(values[key], file);
    if (rope.text("rope_type", rope.text("type", "default")) != "default")
      values.fail(key, "\"rope_type\": \"default\"");
    options.rope_theta = rope.number("rope_theta", options.rope_theta);
  }
  return options;
}

}  // namespace

std::vector<ForeignTensor> foreign_tensors(const GptOptions& options) {
  const Family family = family_of(options);
  std::vector<ForeignTensor> tensors;
  for (const ParameterShape& shape : parameter_shapes(options)) {
    const std::size_t dot = shape.name.rfind('.');
    const std::string module = shape.name.substr(0, dot);
    // GPT-2's linear layers were convolutions once, with their weights the other way round.
    const bool linear = module.find("attention.") != std::string::npos || module.find("mlp.") != std::string::npos;
    std::int64_t row = 0;
    for (const Part& part : parts_of(module, options, family)) {
      ForeignTensor tensor{part.name + shape.name.substr(dot), shape.sizes, shape.name, row, part.rows};
      tensor.shape[0] = part.rows;
      tensor.transposed = family == Family::kGpt2 && linear && tensor.shape.size() == 2;
      if (tensor.transposed) std::swap(tensor.shape[0], tensor.shape[1]);
      row += part.rows;
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

std::optional<std::string> foreign_name(const std::string& name, const GptOptions& options) {
  for (const char* constant : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"})
    if (name.ends_with(constant)) return std::nullopt;
  const std::string first = family_of(options) == Family::kGpt2 ? "transformer." : "model.";
  return name.starts_with(first) || name.starts_with("lm_head.") ? name : first + name;
}

json foreign_config(const GptOptions& o, const std::string& dtype) {
  const Family family = family_of(o);
  json config = {{"vocab_size", o.vocabulary},
                 {"tie_word_embeddings", o.tied_head},
                 {"torch_dtype", dtype},
                 {"bos_token_id", nullptr},  // unknown here; what the library supposes may be outside the vocabulary
                 {"eos_token_id", nullptr}};
  if (family == Family::kGpt2) {
    config.update({{"architectures", {"GPT2LMHeadModel"}},
                   {"model_type", "gpt2"},
                   {"n_positions", o.context},
                   {"n_layer", o.layers},
                   {"n_embd", o.width},
                   {"n_head", o.heads},
                   {"n_inner", o.hidden_width()},
                   {"activation_function", "gelu_new"},
                   {"layer_norm_epsilon", o.norm_eps},
                   {"resid_pdrop", o.dropout},
                   {"embd_pdrop", o.dropout},
                   {"attn_pdrop", o.dropout}});
    return config;
  }
  config.update({{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"max_position_embeddings", o.context},
                 {"num_hidden_layers", o.layers},
                 {"hidden_size", o.width},
                 {"intermediate_size", o.hidden_width()},
                 {"num_attention_heads", o.heads},
                 {"num_key_value_heads", o.key_width() / o.head_width()},
                 {"head_dim", o.head_width()},
                 {"hidden_act", "silu"},
                 {"rms_norm_eps", o.norm_eps},
                 {"rope_theta", o.rope_theta},  // where libraries up to 4 look
                 {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", o.rope_theta}}},
                 {"attention_bias", o.bias},
                 {"mlp_bias", o.bias},
                 {"attention_dropout", 0.0}});
  return config;
}

GptOptions options_of_foreign(const json& config, const std::string& file) {
  const Values values(config, file);
  const std::string type = values.text("model_type", "");
  if (type != "gpt2" && type != "llama") values.fail("model_type", "\"gpt2\" or \"llama\"");
  GptOptions options = type == "gpt2" ? gpt2_of(values) : llama_of(values, file);
  try {
    check(options);
  } catch (const ConfigError& e) {
    throw ConfigError(kOperation, "can't be taken (", file, "; ", e.what(), ")");
  }
  return options;
}

}  // namespace ballast::models
