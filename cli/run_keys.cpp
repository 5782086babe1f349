#include "cli/run_keys.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "ballast/base/error.h"
#include "ballast/config/bind.h"
#include "ballast/config/value.h"

namespace ballast::cli {
namespace {

using namespace schema;
using nlohmann::json;
using Keys = std::vector<Key<RunFile>>;

/// A text, which the engine's schema has nowhere.
template <class Field>
Key<RunFile> text(KeyInfo info, Field field) {
  info.allowed = {.kind = Kind::kText};
  const RunFile defaults;
  if (info.fallback.empty()) info.fallback = json(field(defaults)).dump();
  Key<RunFile> key;
  key.read = [info, field](RunFile& run, const json& value, const std::string& path) {
    check_kind(value, info.allowed, path);
    field(run) = value.get<std::string>();
  };
  key.write = [field](const RunFile& run) { return json(field(run)); };
  key.info = std::move(info);
  return key;
}

Key<RunFile> window_key() {
  Key<RunFile> key;
  key.info = {.path = "train.window",
              .allowed = {.kind = Kind::kPair, .min = 1, .max = 1e6, .null = true},
              .meaning =
                  "Backwards a step where the engine's windows are caller-owned: drawn anew for each step between "
                  "the two, the same on all ranks. One number n stands for [n, n].",
              .fallback = "[1,1]"};
  key.read = [allowed = key.info.allowed](RunFile& run, const json& value, const std::string& path) {
    if (value.is_null()) return;
    const json pair = value.is_number() ? json::array({value, value}) : value;
    const auto [low, high] = read_pair(pair, allowed, path);
    if (std::floor(low) != low || std::floor(high) != high) wrong_type(value, allowed, path);
    if (low > high) throw ConfigError("config.parse", "out of range (", path, " = ", show(value), "; want min <= max)");
    run.train.window_min = static_cast<std::int64_t>(low);
    run.train.window_max = static_cast<std::int64_t>(high);
  };
  key.write = [](const RunFile& run) { return json::array({run.train.window_min, run.train.window_max}); };
  return key;
}

Allowed positive() {
  Allowed allowed = number(0);
  allowed.open_min = true;
  return allowed;
}

void add_model(Keys& keys) {
  keys.push_back(bind<RunFile>(
      {.path = "model.layers", .allowed = integer(1), .meaning = "Transformer blocks."},
      [](auto& r) -> auto& { return r.model.layers; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.width", .allowed = integer(1), .meaning = "Size of the residual path, a multiple of the heads."},
      [](auto& r) -> auto& { return r.model.width; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.heads", .allowed = integer(1), .meaning = "Attention heads a block."},
      [](auto& r) -> auto& { return r.model.heads; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.key_heads",
       .allowed = integer(0),
       .meaning = "Heads of keys and values, a divisor of the heads; 0: as many as those."},
      [](auto& r) -> auto& { return r.model.key_heads; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.norm",
       .allowed = choice({"layer", "rms"}),
       .meaning = "Layer norm, or division by the root of the mean square."},
      [](auto& r) -> auto& { return r.model.norm; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.norm_eps", .allowed = positive(), .meaning = "Added to the variance or mean square."},
      [](auto& r) -> auto& { return r.model.norm_eps; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.positions",
       .allowed = choice({"learned", "rotary"}),
       .meaning = "An embedding, or a rotation of queries and keys."},
      [](auto& r) -> auto& { return r.model.positions; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.rope_theta", .allowed = positive(), .meaning = "Base of the wavelengths of rotary positions."},
      [](auto& r) -> auto& { return r.model.rope_theta; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.mlp",
       .allowed = choice({"gelu", "swiglu"}),
       .meaning = "Two layers with a GELU between, or with a SiLU gate beside the first."},
      [](auto& r) -> auto& { return r.model.mlp; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.mlp_width",
       .allowed = integer(0),
       .meaning = "Between the MLP's two layers; 0: 4 times the width, with \"swiglu\" 8/3 of it in whole 64s."},
      [](auto& r) -> auto& { return r.model.mlp_width; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.bias", .allowed = boolean(), .meaning = "Linear layers and layer norms have one."},
      [](auto& r) -> auto& { return r.model.bias; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.context",
       .allowed = integer(1),
       .meaning = "Longest sequence, and the length of the windows of text."},
      [](auto& r) -> auto& { return r.model.context; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.vocabulary", .allowed = integer(1), .meaning = "Different tokens; text as bytes needs 256."},
      [](auto& r) -> auto& { return r.model.vocabulary; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.dropout",
       .allowed = {.kind = Kind::kNumber, .min = 0, .max = 1, .open_max = true},
       .meaning = "Of embeddings, attention weights and residuals, while training."},
      [](auto& r) -> auto& { return r.model.dropout; }));
  keys.push_back(bind<RunFile>(
      {.path = "model.tied_head", .allowed = boolean(), .meaning = "The output head is the token embedding."},
      [](auto& r) -> auto& { return r.model.tied_head; }));
}

void add_data(Keys& keys) {
  keys.push_back(text(
      {.path = "data.path",
       .meaning = "A file, or a folder that is searched recursively; relative paths start where the "
                  "command runs.",
       .fallback = "required"},
      [](auto& r) -> auto& { return r.data.path; }));
  keys.push_back(bind<RunFile>(
      {.path = "data.format",
       .allowed = choice({"bytes", "uint16", "uint32"}),
       .meaning = "What a token is in the files: a byte, or a little-endian number."},
      [](auto& r) -> auto& { return r.data.format; }));
  keys.push_back(bind<RunFile>(
      {.path = "data.extensions",
       .allowed = texts(),
       .meaning = "Which files of a folder, \".py\" for instance; none: all."},
      [](auto& r) -> auto& { return r.data.extensions; }));
  keys.push_back(bind<RunFile>(
      {.path = "data.allow_binary",
       .allowed = boolean(),
       .meaning = "Take files of bytes that have a zero byte in their first 64 KiB."},
      [](auto& r) -> auto& { return r.data.allow_binary; }));
  keys.push_back(bind<RunFile>(
      {.path = "data.held_out",
       .allowed = {.kind = Kind::kNumber, .min = 0, .max = 0.5},
       .meaning = "Share of the windows that is never trained on, in runs of 64 spread over "
                  "the text; evaluation reads them. 0: no evaluation."},
      [](auto& r) -> auto& { return r.data.held_out; }));
}

void add_train(Keys& keys) {
  keys.push_back(text(
      {.path = "train.name",
       .meaning = "The run's files are in this folder below train.folder; an earlier run of that name "
                  "is replaced, but for one with checkpoints, with which --resume goes on.",
       .fallback = "the file's name"},
      [](auto& r) -> auto& { return r.train.name; }));
  keys.push_back(text(
      {.path = "train.folder", .meaning = "Where runs are kept."}, [](auto& r) -> auto& { return r.train.folder; }));
  keys.push_back(bind<RunFile>(
      {.path = "train.steps",
       .allowed = integer(1),
       .meaning = "Windows of the whole run. Fills in scheduler.params.total_num_steps where a schedule needs it."},
      [](auto& r) -> auto& { return r.train.steps; }));
  keys.push_back(window_key());
  keys.push_back(bind<RunFile>(
      {.path = "train.activation_checkpointing",
       .allowed = boolean(),
       .meaning = "Keep each block's input only, and compute the block again in backward."},
      [](auto& r) -> auto& { return r.train.activation_checkpointing; }));
  keys.push_back(bind<RunFile>(
      {.path = "train.eval_every", .allowed = integer(0), .meaning = "Steps between evaluations; 0: at the end only."},
      [](auto& r) -> auto& { return r.train.eval_every; }));
  keys.push_back(bind<RunFile>(
      {.path = "train.eval_windows",
       .allowed = integer(1),
       .meaning = "Held-out windows that an evaluation reads at most, evenly chosen."},
      [](auto& r) -> auto& { return r.train.eval_windows; }));
  keys.push_back(bind<RunFile>(
      {.path = "train.seed",
       .allowed = integer(0, 9e15),
       .meaning = "Of the weights, the order of the text, the windows' lengths, dropout and the sample."},
      [](auto& r) -> auto& { return r.train.seed; }));
  keys.push_back(bind<RunFile>(
      {.path = "train.threads",
       .allowed = integer(0, 4096),
       .meaning = "CPU threads a rank; 0: as LibTorch chooses (OMP_NUM_THREADS)."},
      [](auto& r) -> auto& { return r.train.threads; }));
  keys.push_back(text(
      {.path = "train.device", .meaning = "\"cpu\", \"cuda\", \"cuda:1\", or \"auto\": CUDA where there is one."},
      [](auto& r) -> auto& { return r.train.device; }));
}

void add_save(Keys& keys) {
  keys.push_back(bind<RunFile>(
      {.path = "save.every",
       .allowed = integer(0),
       .meaning = "Steps between checkpoints, as by --save-every; 0: at the end and at an interruption only, where "
                  "save.folder is given or the run goes on with its own."},
      [](auto& r) -> auto& { return r.save.every; }));
  keys.push_back(text(
      {.path = "save.folder",
       .meaning = "Where checkpoints are, as by --save; all ranks write there. None: checkpoints in the run's folder."},
      [](auto& r) -> auto& { return r.save.folder; }));
  keys.push_back(bind<RunFile>(
      {.path = "save.keep_last",
       .allowed = integer(0),
       .meaning = "So many of this run's are kept, as by --keep-last; 0: all."},
      [](auto& r) -> auto& { return r.save.keep_last; }));
  keys.push_back(bind<RunFile>(
      {.path = "save.asynchronous",
       .allowed = boolean(),
       .meaning = "Copy a rank's states to host memory, and write them behind the training."},
      [](auto& r) -> auto& { return r.save.asynchronous; }));
}

void add_sample(Keys& keys) {
  keys.push_back(bind<RunFile>(
      {.path = "sample.count", .allowed = integer(0), .meaning = "Tokens to generate at the end, as by --sample."},
      [](auto& r) -> auto& { return r.sample.count; }));
  keys.push_back(text(
      {.path = "sample.prompt", .meaning = "What the sample goes on from; not empty."},
      [](auto& r) -> auto& { return r.sample.prompt; }));
  keys.push_back(bind<RunFile>(
      {.path = "sample.temperature",
       .allowed = number(0),
       .meaning = "Logits are divided by it; 0: always the likeliest token."},
      [](auto& r) -> auto& { return r.sample.temperature; }));
  keys.push_back(bind<RunFile>(
      {.path = "sample.top_k", .allowed = integer(0), .meaning = "Draw among the k likeliest tokens only; 0: all."},
      [](auto& r) -> auto& { return r.sample.top_k; }));
}

}  // namespace

const std::vector<Key<RunFile>>& run_keys() {
  static const Keys keys = [] {
    Keys all;
    add_model(all);
    add_data(all);
    add_train(all);
    add_save(all);
    add_sample(all);
    return all;
  }();
  return keys;
}

const std::vector<std::string>& own_sections() {
  static const std::vector<std::string> sections{"model", "data", "train", "save", "sample"};
  return sections;
}

const std::vector<std::string>& known_run_paths() {
  static const std::vector<std::string> paths = [] {
    std::vector<std::string> all = own_sections();
    all.push_back("engine");
    for (const auto& key : run_keys()) all.push_back(key.info.path);
    std::set<std::string> engine;  // with the sections on the way: a key at the top belongs into "engine"
    for (const std::string& path : known_paths())
      for (auto dot = path.find('.');; dot = path.find('.', dot + 1)) {
        engine.insert("engine." + path.substr(0, dot));
        if (dot == std::string::npos) break;
      }
    all.insert(all.end(), engine.begin(), engine.end());
    return all;
  }();
  return paths;
}

}  // namespace ballast::cli
