#include "ballast/checkpoint/manifest.h"

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <string_view>

#include "ballast/base/checksum.h"
#include "ballast/base/error.h"
#include "ballast/checkpoint/bounded_json.h"
#include "ballast/checkpoint/element_type.h"

namespace ballast::ckpt {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "ballast-checkpoint";
constexpr int kDepth = 64;  // client_state may be nested
constexpr std::string_view kNoChecksum = "0000000000000000";
constexpr std::string_view kChecksumKey = "\"checksum\": \"";  // its first place in the text is the manifest's own

Json to_json(const Piece& piece) {
  return {{"file", piece.file},
          {"tensor", piece.tensor},
          {"begin", piece.begin},
          {"end", piece.end},
          {"checksum", checksum_text(piece.checksum)}};
}

Json to_json(const Pieces& pieces) {
  Json list = Json::array();
  for (const Piece& piece : pieces) list.push_back(to_json(piece));
  return list;
}

Json to_json(const ParameterRecord& parameter) {
  Json states = Json::object();
  for (const auto& [key, pieces] : parameter.states) states[key] = to_json(pieces);
  return {{"names", parameter.names},
          {"shape", parameter.shape},
          {"dtype", name_of(parameter.dtype)},
          {"trainable", parameter.trainable},
          {"steps", parameter.steps},
          {"fresh", parameter.fresh},
          {"states", states}};
}

/// A value of the manifest with the way to it, for complaints.
class Node {
 public:
  Node(const Json& json, std::string path, const std::string& file)
      : json_(json), path_(std::move(path)), file_(file) {}

  Node operator[](const char* key) const {
    if (!json_.is_object() || !json_.contains(key)) fail(std::string("has no ") + key);
    return {json_[key], path_.empty() ? key : path_ + "." + key, file_};
  }
  bool has(const char* key) const { return json_.is_object() && json_.contains(key) && !json_[key].is_null(); }
  std::vector<Node> list() const {
    if (!json_.is_array()) fail("is no array");
    std::vector<Node> nodes;
    for (std::size_t i = 0; i < json_.size(); ++i)
      nodes.emplace_back(json_[i], path_ + "[" + std::to_string(i) + "]", file_);
    return nodes;
  }
  std::vector<std::pair<std::string, Node>> members() const {
    if (!json_.is_object()) fail("is no object");
    std::vector<std::pair<std::string, Node>> nodes;
    for (const auto& [key, value] : json_.items()) nodes.emplace_back(key, Node(value, path_ + "." + key, file_));
    return nodes;
  }
  const Json& json() const { return json_; }
  std::string text() const {
    if (!json_.is_string()) fail("is no text");
    return json_.get<std::string>();
  }
  bool flag() const {
    if (!json_.is_boolean()) fail("is neither true nor false");
    return json_.get<bool>();
  }
  std::int64_t number(std::int64_t least = 0, std::int64_t most = std::numeric_limits<std::int64_t>::max()) const {
    const bool fits =
        json_.is_number_integer() &&
        (!json_.is_number_unsigned() ||
         json_.get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
    if (!fits || json_.get<std::int64_t>() < least || json_.get<std::int64_t>() > most)
      fail("is no whole number from " + std::to_string(least) + " to " + std::to_string(most));
    return json_.get<std::int64_t>();
  }
  double real() const {
    if (!json_.is_number()) fail("is no number");
    return json_.get<double>();
  }
  std::uint64_t checksum() const {
    const auto value = checksum_of_text(text());
    if (!value) fail("is no checksum");
    return *value;
  }
  c10::ScalarType dtype() const {
    const auto type = element_type(text());
    if (!type) fail("is no known element type");
    return *type;
  }
  std::string plain_name() const {
    if (!is_plain_name(text())) fail("is no plain file name");
    return text();
  }
  [[noreturn]] void fail(const std::string& what) const {
    std::string value = json_.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (value.size() > 60) value = value.substr(0, 57) + "...";
    throw IoError("checkpoint.read", "a bad manifest (", file_, "; ", path_.empty() ? "the document" : path_, " ", what,
                  ": ", value, ")");
  }

 private:
  const Json& json_;
  const std::string path_;
  const std::string& file_;
};

std::vector<std::string> texts(const Node& node) {
  std::vector<std::string> values;
  for (const Node& item : node.list()) values.push_back(item.text());
  return values;
}

std::vector<std::int64_t> shape_of(const Node& node, std::int64_t& numel) {
  std::vector<std::int64_t> shape;
  for (const Node& item : node.list()) shape.push_back(item.number());
  numel = 1;
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (const std::int64_t size : shape)
    if (!empty && __builtin_mul_overflow(numel, size, &numel)) node.fail("has too many elements");
  if (empty) numel = 0;
  return shape;
}

std::map<std::string, std::int64_t> numbers(const Node& node) {
  std::map<std::string, std::int64_t> values;
  for (const auto& [key, value] : node.members()) values[key] = value.number(std::numeric_limits<std::int64_t>::min());
  return values;
}

Piece piece_of(const Node& node) {
  Piece piece{node["file"].plain_name(), node["tensor"].text(), node["begin"].number(), node["end"].number(),
              node["checksum"].checksum()};
  if (piece.begin > piece.end) node.fail("is no range");
  return piece;
}

Pieces pieces_of(const Node& node, std::int64_t numel) {
  Pieces pieces;
  std::int64_t end = 0;
  for (const Node& item : node.list()) {
    pieces.push_back(piece_of(item));
    if (pieces.back().begin != end) item.fail("leaves a gap or overlaps the one before");
    end = pieces.back().end;
  }
  if (end != numel) node.fail("has pieces of " + std::to_string(end) + " of " + std::to_string(numel) + " elements");
  return pieces;
}

ParameterRecord parameter_of(const Node& node) {
  ParameterRecord parameter;
  parameter.names = texts(node["names"]);
  if (parameter.names.empty()) node.fail("has no name");
  parameter.shape = shape_of(node["shape"], parameter.numel);
  parameter.dtype = node["dtype"].dtype();
  parameter.trainable = node["trainable"].flag();
  parameter.steps = node["steps"].number();
  parameter.fresh = node["fresh"].flag();
  for (const auto& [key, pieces] : node["states"].members()) parameter.states[key] = pieces_of(pieces, parameter.numel);
  if (!parameter.states.contains(parameter.trainable ? "master" : "param")) node["states"].fail("lacks the weights");
  return parameter;
}

BufferRecord buffer_of(const Node& node) {
  BufferRecord buffer;
  buffer.name = node["name"].text();
  buffer.shape = shape_of(node["shape"], buffer.numel);
  buffer.dtype = node["dtype"].dtype();
  buffer.pieces = pieces_of(node["pieces"], buffer.numel);
  return buffer;
}

WindowRecord window_of(const Node& node) {
  WindowRecord window{node["managed"].flag(),      node["micro_batches"].number(), node["backwards"].number(),
                      node["since_step"].number(), node["weight"].real(),          node["scaling"].text()};
  if (window.scaling != "mean" && window.scaling != "sum" && window.scaling != "weighted")
    node["scaling"].fail("is none of mean, sum, weighted");
  return window;
}

// The whole text with its own checksum's digits as zeros.
std::uint64_t own_checksum(std::string text, std::size_t digits) {
  text.replace(digits, kNoChecksum.size(), kNoChecksum);
  return checksum(std::as_bytes(std::span(text)));
}

void check_unique(const Manifest& manifest, const std::string& file) {
  std::set<std::string> files, names;
  for (const FileRecord& record : manifest.files)
    if (!files.insert(record.name).second)
      throw IoError("checkpoint.read", "a bad manifest (", file, "; file ", record.name, " is listed twice)");
  const auto known = [&](const Piece& piece) {
    if (!files.contains(piece.file))
      throw IoError("checkpoint.read", "a bad manifest (", file, "; file ", piece.file, " is not listed)");
  };
  const auto fresh = [&](const std::string& name) {
    if (!names.insert(name).second)
      throw IoError("checkpoint.read", "a bad manifest (", file, "; ", name, " is listed twice)");
  };
  for (const ParameterRecord& parameter : manifest.parameters) {
    for (const std::string& name : parameter.names) fresh(name);
    for (const auto& [key, pieces] : parameter.states) std::for_each(pieces.begin(), pieces.end(), known);
  }
  for (const BufferRecord& buffer : manifest.buffers) {
    fresh(buffer.name);
    std::for_each(buffer.pieces.begin(), buffer.pieces.end(), known);
  }
  for (const auto& generators : manifest.rng)
    for (const auto& [name, piece] : generators) known(piece);
}

}  // namespace

bool is_plain_name(const std::string& name) {
  constexpr std::size_t kMostBytes = 200;
  return !name.empty() && name.size() <= kMostBytes && name.front() != '.' &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

std::string new_run() {
  std::random_device random;
  return checksum_text((std::uint64_t{random()} << 32) | random());
}

std::string Manifest::to_text() const {
  Json json = {{"tag", tag},
               {"run", run},
               {"saved", saved},
               {"world", world},
               {"stage", stage},
               {"compute_dtype", compute_dtype},
               {"optimizer", {{"type", optimizer}, {"states", keys}}},
               {"counters", counters},
               {"loss_scale", loss_scale},
               {"loss_scaler", loss_scaler},
               {"scheduler", {{"config", scheduler}, {"steps", schedule_steps}}},
               {"lr", lr},
               {"client_state", client_state},
               {"window", nullptr},
               {"rng", Json::array()},
               {"files", Json::array()},
               {"parameters", Json::array()},
               {"buffers", Json::array()}};
  if (window)
    json["window"] = {{"managed", window->managed},     {"micro_batches", window->micro_batches},
                      {"backwards", window->backwards}, {"since_step", window->since_step},
                      {"weight", window->weight},       {"scaling", window->scaling}};
  for (const auto& generators : rng) {
    Json of_rank = Json::object();
    for (const auto& [name, piece] : generators) of_rank[name] = to_json(piece);
    json["rng"].push_back(of_rank);
  }
  for (const FileRecord& file : files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"checksum", checksum_text(file.checksum)}});
  for (const ParameterRecord& parameter : parameters) json["parameters"].push_back(to_json(parameter));
  for (const BufferRecord& buffer : buffers)
    json["buffers"].push_back({{"name", buffer.name},
                               {"shape", buffer.shape},
                               {"dtype", name_of(buffer.dtype)},
                               {"pieces", to_json(buffer.pieces)}});

  std::string text = "{\n \"format\": \"" + std::string(kFormat) + "\",\n \"version\": " + std::to_string(kVersion) +
                     ",\n " + std::string(kChecksumKey);
  const std::size_t digits = text.size();
  text.append(kNoChecksum).append("\",");
  try {
    text += json.dump(1).substr(1) + "\n";
  } catch (const Json::exception& e) {
    throw UseError("checkpoint.save", "a name, or the client's state, is no valid UTF-8 (", e.what(), ")");
  }
  return text.replace(digits, kNoChecksum.size(), checksum_text(own_checksum(text, digits)));
}

Manifest Manifest::from_text(const std::string& text, const std::string& file) {
  const Json json = parse_bounded(text, kDepth, file);
  const Node root(json, "", file);
  if (!root.has("format") || root["format"].json() != kFormat) root.fail("is no manifest of a checkpoint");
  const std::int64_t version = root["version"].number(1);
  if (version > kVersion)
    throw IoError("checkpoint.read", "the checkpoint has a newer format (", file, "; version ", version,
                  ", this program reads up to ", kVersion, "; load it with a newer version of Ballast)");
  const std::uint64_t want = root["checksum"].checksum();
  const std::size_t at = text.find(kChecksumKey);
  if (at == std::string::npos || text.size() - at - kChecksumKey.size() < kNoChecksum.size())
    root["checksum"].fail("is not where a manifest has it");
  const std::uint64_t got = own_checksum(text, at + kChecksumKey.size());
  if (got != want)
    throw IoError("checkpoint.read", "the manifest is not what was written (", file, "; checksum got ",
                  checksum_text(got), ", want ", checksum_text(want), "; load another checkpoint)");

  Manifest manifest;
  manifest.tag = root["tag"].text();
  if (root.has("run")) manifest.run = root["run"].text();
  if (root.has("saved")) manifest.saved = root["saved"].real();
  manifest.world = static_cast<int>(root["world"].number(1, 1 << 30));
  manifest.stage = static_cast<int>(root["stage"].number(0, 3));
  manifest.compute_dtype = root["compute_dtype"].text();
  manifest.optimizer = root["optimizer"]["type"].text();
  manifest.keys = texts(root["optimizer"]["states"]);
  manifest.counters = numbers(root["counters"]);
  manifest.loss_scale = root["loss_scale"].real();
  manifest.loss_scaler = numbers(root["loss_scaler"]);
  manifest.scheduler = root["scheduler"]["config"].text();
  manifest.schedule_steps = root["scheduler"]["steps"].number();
  for (const Node& rate : root["lr"].list()) manifest.lr.push_back(rate.real());
  if (root.has("window")) manifest.window = window_of(root["window"]);
  for (const Node& rank : root["rng"].list()) {
    auto& generators = manifest.rng.emplace_back();
    for (const auto& [name, piece] : rank.members()) generators[name] = piece_of(piece);
  }
  manifest.client_state = root["client_state"].json();
  for (const Node& node : root["files"].list())
    manifest.files.push_back({node["name"].plain_name(), node["bytes"].number(), node["checksum"].checksum()});
  for (const Node& node : root["parameters"].list()) manifest.parameters.push_back(parameter_of(node));
  for (const Node& node : root["buffers"].list()) manifest.buffers.push_back(buffer_of(node));
  check_unique(manifest, file);
  return manifest;
}

}  // namespace ballast::ckpt
