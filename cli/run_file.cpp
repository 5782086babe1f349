#include "cli/run_file.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/config/json_text.h"
#include "ballast/config/nearest.h"
#include "ballast/config/value.h"
#include "cli/run_keys.h"

namespace ballast::cli {
namespace {

using nlohmann::json;
using schema::show;

constexpr const char* kParse = "config.parse";

[[noreturn]] void unknown_key(const json& value, const std::string& path) {
  throw ConfigError(kParse, "unknown key (", path, " = ", show(value),
                    "; nearest known key: ", nearest_path(path, known_run_paths()), ")");
}

/// A key of the engine's at the top: that is how DeepSpeed's files look, and what to do with one isn't a matter of
/// names.
void refuse_engine_key(const json& value, const std::string& name) {
  const auto& known = schema::known_paths();
  if (std::none_of(known.begin(), known.end(),
                   [&](const std::string& path) { return path == name || path.rfind(name + ".", 0) == 0; }))
    return;
  throw ConfigError(kParse, "a key of the engine's configuration outside of it (", name, " = ", show(value),
                    "; want the whole configuration under \"engine\", and the text under data.path: {\"engine\": {\"",
                    name, "\": ...}, \"data\": {\"path\": ...}})");
}

void read_own_sections(const json& root, RunFile& run) {
  for (const std::string& section : own_sections()) {
    const auto object = root.find(section);
    if (object == root.end() || object->is_null()) continue;
    if (!object->is_object()) schema::wrong_type(*object, {.kind = schema::Kind::kObject}, section);
    for (const auto& [name, value] : object->items()) {
      const std::string path = section + "." + name;
      const auto key = std::find_if(run_keys().begin(), run_keys().end(),
                                    [&](const auto& candidate) { return candidate.info.path == path; });
      if (key == run_keys().end()) unknown_key(value, path);
      key->read(run, value, path);
    }
  }
}

/// A schedule that ends needs the number of steps, which the run knows.
void fill_in_total_steps(json& engine, std::int64_t steps) {
  const json::json_pointer total("/scheduler/params/total_num_steps"), type("/scheduler/type");
  if (!engine.is_object() || !engine.contains(type) || !engine[type].is_string()) return;
  std::string name = engine[type].get<std::string>();
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  if (name != "warmupdecaylr" && name != "warmupcosinelr") return;
  if (engine.contains("/scheduler/params"_json_pointer) && !engine["scheduler"]["params"].is_object()) return;
  if (!engine.contains(total) || engine[total] == "auto") engine[total] = steps;
}

void check_contradictions(const RunFile& run, const json& root) {
  const json window = root.value("/train/window"_json_pointer, json());
  if (run.data.path.empty()) throw ConfigError(kParse, "required key (data.path; want text)");
  if (run.engine.managed_gradient_accumulation && !window.is_null())
    throw ConfigError(kParse, "contradiction (train.window = ", show(window),
                      " with managed windows; set engine.managed_gradient_accumulation to false, or "
                      "engine.gradient_accumulation_steps in its place)");
  if (run.data.format == data::TokenFormat::kByte && run.model.vocabulary < 256)
    throw ConfigError(kParse, "contradiction (model.vocabulary = ", run.model.vocabulary,
                      " with data.format = \"bytes\"; want at least 256)");
  if (run.sample.prompt.empty()) throw ConfigError(kParse, "out of range (sample.prompt = \"\"; want text)");
  if (run.train.name.empty() || run.train.name.find('/') != std::string::npos || run.train.name[0] == '.')
    throw ConfigError(kParse, "out of range (train.name = ", show(run.train.name), "; want the name of a folder)");
  models::check(run.model);
}

/// The defaults that depend on other options, as numbers.
models::GptOptions spelled_out(models::GptOptions options) {
  if (options.key_heads == 0) options.key_heads = options.heads;
  options.mlp_width = options.hidden_width();
  return options;
}

void adopt(json& root, const GivenModel& given) {
  json& section = root["model"];
  if (section.is_null()) section = json::object();
  if (!section.is_object()) return;  // what reads it says so
  const json theirs = model_to_json(spelled_out(given.options));
  json merged = theirs;
  merged.update(section);
  RunFile wanted;  // not checked yet: that its values fit together matters less than that they are those of the weights
  read_own_sections({{"model", merged}}, wanted);
  for (const ModelDifference& key : differences(wanted.model, given.options)) {
    const bool free =
        key.name == "dropout" || (key.name == "context" && given.options.positions == models::PositionKind::kRotary);
    if (!free)
      throw ConfigError(kParse, "contradiction (model.", key.name, " = ", key.first, ", that of the weights in ",
                        given.where, " = ", key.second, "; leave the key out)");
  }
  section = merged;
}

}  // namespace

RunFile RunFile::load(const std::filesystem::path& file, const std::vector<std::string>& changes,
                      const std::optional<GivenModel>& given) {
  json root = read_json_file(file);
  for (const std::string& change : changes) apply_change(root, change);
  if (given && root.is_object()) adopt(root, *given);
  return from_json(std::move(root), file.stem().string());
}

RunFile RunFile::from_json(json root, const std::string& name) {
  if (!root.is_object()) throw ConfigError(kParse, "wrong type (the run = ", show(root), "; want an object)");
  for (const auto& [section, value] : root.items())
    if (section != "engine" && std::count(own_sections().begin(), own_sections().end(), section) == 0) {
      refuse_engine_key(value, section);
      unknown_key(value, section);
    }
  RunFile run;
  run.train.name = name;
  read_own_sections(root, run);
  run.model.seed = run.train.seed;
  json engine = root.value("engine", json::object());
  fill_in_total_steps(engine, run.train.steps);
  run.engine = Config::from_json(engine, "engine.");
  check_contradictions(run, root);
  return run;
}

std::filesystem::path RunFile::run_folder() const { return std::filesystem::path(train.folder) / train.name; }
std::filesystem::path RunFile::save_folder() const {
  return save.folder.empty() ? run_folder() / "checkpoints" : std::filesystem::path(save.folder);
}

json RunFile::to_json() const {
  json root{{"engine", engine.to_json()}};
  for (const auto& key : run_keys()) {
    if (key.info.path == "train.window" && engine.managed_gradient_accumulation) continue;
    const auto dot = key.info.path.find('.');
    root[key.info.path.substr(0, dot)][key.info.path.substr(dot + 1)] = key.write(*this);
  }
  return root;
}

json model_to_json(const models::GptOptions& options) {
  RunFile run;
  run.model = options;
  json section;
  for (const auto& key : run_keys())
    if (key.info.path.starts_with("model.")) section[key.info.path.substr(sizeof "model." - 1)] = key.write(run);
  return section;
}

models::GptOptions model_from_json(const json& section) {
  RunFile run;
  read_own_sections({{"model", section}}, run);
  models::check(run.model);
  return run.model;
}

std::vector<ModelDifference> differences(const models::GptOptions& first, const models::GptOptions& second) {
  const json ours = model_to_json(spelled_out(first)), theirs = model_to_json(spelled_out(second));
  std::vector<ModelDifference> found;
  for (const auto& [name, value] : ours.items())
    if (theirs[name] != value) found.push_back({name, show(value), show(theirs[name])});
  return found;
}

bool is_run_file(const json& root) {
  return root.is_object() && (root.contains("engine") || std::any_of(own_sections().begin(), own_sections().end(),
                                                                     [&](const auto& s) { return root.contains(s); }));
}

void apply_change(json& root, const std::string& change) {
  const auto equals = change.find('=');
  if (equals == std::string::npos || equals == 0)
    throw ConfigError("cli.set", "not a change (", change, "; want section.key=value, as in train.steps=100)");
  const std::string path = change.substr(0, equals), text = change.substr(equals + 1);
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) value = text;

  json* at = &root;
  for (std::size_t begin = 0;;) {
    const auto dot = path.find('.', begin);
    if (!at->is_object() && !at->is_null())
      throw ConfigError("cli.set", "not an object on the way (", path.substr(0, begin - 1), " = ", show(*at), " in ",
                        change, ")");
    at = &(*at)[path.substr(begin, dot - begin)];
    if (dot == std::string::npos) break;
    begin = dot + 1;
  }
  *at = std::move(value);
}

}  // namespace ballast::cli
