#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ballast/models/gpt_options.h"

/// How Hugging Face's libraries name and lay out what a Gpt holds: as GPT2LMHeadModel or LlamaForCausalLM. Names and
/// shapes alone; who reads or writes files does that elsewhere.
namespace ballast::models {

/// One of their tensors: rows of one of a Gpt's parameters.
struct ForeignTensor {
  std::string name;                 // "model.layers.0.self_attn.k_proj.weight"
  std::vector<std::int64_t> shape;  // there
  std::string parameter;            // here, as in named_parameters()
  std::int64_t first_row = 0, rows = 0;
  bool transposed = false;  // [in, out] there, [out, in] here
};

/// All of such a model's, those of one parameter behind each other and together all of its rows, parameters in
/// parameter_shapes()'s order. A tied head has none of its own. Throws ConfigError where the options are of neither
/// family.
std::vector<ForeignTensor> foreign_tensors(const GptOptions& options);

/// A tensor's name in a file as foreign_tensors() spells it: files of the bare decoder leave the first word out.
/// Nothing for what is no weight, as old files' masks and wavelengths.
std::optional<std::string> foreign_name(const std::string& name, const GptOptions& options);

/// config.json for these options. dtype: "float32" or "bfloat16", of the file's tensors. Throws as foreign_tensors().
nlohmann::json foreign_config(const GptOptions& options, const std::string& dtype);

/// The options that a config.json describes; the seed stays 0. file: its name, for errors. Throws ConfigError for
/// another family, a missing or wrong value, and what a Gpt can't compute (scaled positions, another activation).
GptOptions options_of_foreign(const nlohmann::json& config, const std::string& file);

}  // namespace ballast::models
