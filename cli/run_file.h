#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ballast/config/config.h"
#include "ballast/data/corpus.h"
#include "ballast/models/gpt_options.h"

namespace ballast::cli {

struct DataSection {
  std::string path;
  data::TokenFormat format = data::TokenFormat::kByte;
  std::vector<std::string> extensions;
  bool allow_binary = false;
  double held_out = 0.01;
};

struct TrainSection {
  std::string name;  // of the run's folder below `folder`; the file's own name where none is given
  std::string folder = "runs";
  std::int64_t steps = 1000;
  std::int64_t window_min = 1, window_max = 1;  // caller-owned windows only
  bool activation_checkpointing = false;
  std::int64_t eval_every = 0;  // steps; 0: at the end only
  std::int64_t eval_windows = 512;
  std::uint64_t seed = 0;
  int threads = 0;
  std::string device = "auto";
};

/// Checkpoints of the run. Without `every` and `folder` there are none.
struct SaveSection {
  std::int64_t every = 0;      // steps; 0: at the run's end and at an interruption only
  std::string folder;          // "": "checkpoints" in the run's own
  std::int64_t keep_last = 0;  // 0: all
  bool asynchronous = false;

  bool on() const { return every > 0 || !folder.empty(); }
};

struct SampleSection {
  std::int64_t count = 0;
  std::string prompt = "\n";
  double temperature = 0.8;
  std::int64_t top_k = 0;
};

/// A model whose weights a run starts from, and the folder that they are in.
struct GivenModel {
  models::GptOptions options;
  std::string where;
};

/// What `ballast train` runs: the engine's configuration in DeepSpeed's schema, and the sections of the command line's
/// own. docs/train.md describes every key.
struct RunFile {
  Config engine;
  models::GptOptions model;  // its context is also the length of the data's windows; its seed is train.seed
  DataSection data;
  TrainSection train;
  SaveSection save;
  SampleSection sample;

  /// changes: "train.steps=10": made before anything is checked, the value JSON or else text. Throws ConfigError.
  /// given: keys of the section model that the file leaves out are its, the others must agree with it; dropout and,
  /// where positions are rotary, context are the run's own.
  static RunFile load(const std::filesystem::path& file, const std::vector<std::string>& changes,
                      const std::optional<GivenModel>& given = {});
  /// name: what train.name is where the JSON leaves it out.
  static RunFile from_json(nlohmann::json root, const std::string& name);

  std::filesystem::path run_folder() const;
  std::filesystem::path save_folder() const;
  /// Every key with its value; from_json(to_json()) is the same run.
  nlohmann::json to_json() const;
};

/// The section model alone, every key with its value, and back. The seed is none of them. Throws ConfigError.
nlohmann::json model_to_json(const models::GptOptions& options);
models::GptOptions model_from_json(const nlohmann::json& section);

/// A key of the section model with its values in two models, the defaults that depend on other keys as numbers.
struct ModelDifference {
  std::string name, first, second;
};
std::vector<ModelDifference> differences(const models::GptOptions& first, const models::GptOptions& second);

/// Has the JSON one of a run file's sections? Else it is an engine's configuration alone.
bool is_run_file(const nlohmann::json& root);

/// "section.key=value" put into the JSON. Throws ConfigError on another form, or a path through what is no object.
void apply_change(nlohmann::json& root, const std::string& change);

}  // namespace ballast::cli
