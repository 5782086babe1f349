#include "cli/hugging_face.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <set>
#include <system_error>

#include "ballast/base/error.h"
#include "ballast/checkpoint/bounded_json.h"
#include "ballast/checkpoint/manifest.h"
#include "ballast/models/hugging_face.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOperation = "cli.hugging_face";
constexpr std::int64_t kMostJsonBytes = std::int64_t{64} << 20;
constexpr int kMostJsonDepth = 16;

json read_json(const fs::path& file) {
  return ckpt::parse_bounded(ckpt::read_text(file, kMostJsonBytes, {}), kMostJsonDepth, file.string());
}

/// Which tensors go into which file.
struct Shard {
  std::vector<models::ForeignTensor> tensors;
  std::int64_t bytes = 0;
};

std::int64_t bytes_of(const models::ForeignTensor& tensor, c10::ScalarType dtype) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const std::int64_t size : tensor.shape) bytes *= size;
  return bytes;
}

std::vector<Shard> make_shards(const models::GptOptions& options, const ExportOptions& how) {
  std::vector<Shard> shards(1);
  for (models::ForeignTensor& tensor : models::foreign_tensors(options)) {
    const std::int64_t bytes = bytes_of(tensor, how.dtype);
    if (!shards.back().tensors.empty() && shards.back().bytes + bytes > how.most_shard_bytes) shards.emplace_back();
    shards.back().bytes += bytes;
    shards.back().tensors.push_back(std::move(tensor));
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  if (count == 1) return HuggingFaceFolder::kWeights;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

/// Hands out tensors of one parameter after the other, each read once.
class ForeignRows {
 public:
  ForeignRows(WeightSource& weights, const models::GptOptions& options) : weights_(weights) {
    for (models::ParameterShape& shape : models::parameter_shapes(options)) shapes_[shape.name] = std::move(shape);
  }
  at::Tensor read(const models::ForeignTensor& tensor, c10::ScalarType dtype) {
    if (name_ != tensor.parameter) {
      values_ = at::Tensor();  // before the next one is read
      values_ = weights_.read(shapes_.at(tensor.parameter));
      name_ = tensor.parameter;
    }
    const at::Tensor rows = values_.narrow(0, tensor.first_row, tensor.rows);
    return (tensor.transposed ? rows.t() : rows).to(dtype).contiguous();
  }

 private:
  WeightSource& weights_;
  std::map<std::string, models::ParameterShape> shapes_;
  std::string name_;
  at::Tensor values_;
};

void write_shard(const fs::path& file, const Shard& shard, c10::ScalarType dtype, ForeignRows& rows) {
  std::vector<ckpt::TensorSpec> specs;
  for (const models::ForeignTensor& tensor : shard.tensors) specs.push_back({tensor.name, dtype, tensor.shape});
  ckpt::SafetensorsWriter writer(file, std::move(specs), {{"format", "pt"}}, {});
  for (const models::ForeignTensor& tensor : shard.tensors) {
    const at::Tensor values = rows.read(tensor, dtype);
    writer.append({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
  }
  writer.finish();
}

}  // namespace

HuggingFaceFolder::HuggingFaceFolder(fs::path path) : path_(std::move(path)), config_(read_json(path_ / kConfig)) {
  std::error_code ignored;
  if (fs::exists(path_ / kWeights, ignored)) {
    add_file(kWeights);
    return;
  }
  if (!fs::exists(path_ / kIndex, ignored))
    throw IoError(kOperation, "no weights (", path_.string(), " has neither ", kWeights, " nor ", kIndex,
                  "; convert other formats to safetensors first)");
  const json index = read_json(path_ / kIndex);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    throw IoError(kOperation, "no weight_map in the index (", (path_ / kIndex).string(), ")");
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() || !ckpt::is_plain_name(file.get_ref<const std::string&>()))
      throw IoError(kOperation, "a bad file name in the index (", (path_ / kIndex).string(), "; ",
                    file.dump(-1, ' ', true, json::error_handler_t::replace), ")");
    files.insert(file.get<std::string>());
  }
  for (const std::string& file : files) add_file(file);
}

void HuggingFaceFolder::add_file(const std::string& name) {
  const ckpt::SafetensorsReader reader(path_ / name, {});
  for (const ckpt::TensorInfo& tensor : reader.header().tensors)
    if (!stored_.emplace(tensor.name, Stored{name, tensor}).second)
      throw IoError(kOperation, "two files hold a tensor (", path_.string(), "; ", tensor.name, " in ", name, " and ",
                    stored_.at(tensor.name).file, ")");
}

std::optional<models::GptOptions> HuggingFaceFolder::model() const {
  return models::options_of_foreign(config_, (path_ / kConfig).string());
}

void HuggingFaceFolder::check(const models::GptOptions& options) {
  refuse_too_many_layers(options.layers, stored_.size(), path_.string());
  Misfit::Shapes found, wanted;
  std::map<std::string, const Stored*> by_name;
  for (const auto& [name, stored] : stored_) {
    const auto whole = models::foreign_name(name, options);
    if (!whole) continue;
    if (!c10::isFloatingType(stored.tensor.dtype) || c10::elementSize(stored.tensor.dtype) < 2)
      throw UseError(kOperation, "a tensor's type is none of F32, F16, BF16, F64 (", (path_ / stored.file).string(),
                     "; ", name, ")");
    found[*whole] = stored.tensor.shape;
    by_name[*whole] = &stored;
  }
  // A tied head that is there nevertheless is the embedding again, or the two say different things.
  if (const auto head = by_name.find("lm_head.weight"); head != by_name.end() && options.tied_head) {
    const char* embedding =
        options.positions == models::PositionKind::kLearned ? "transformer.wte.weight" : "model.embed_tokens.weight";
    if (!by_name.contains(embedding) || !at::equal(read(*head->second), read(*by_name.at(embedding))))
      throw UseError(kOperation, "the head is not the embedding, which tie_word_embeddings says it is (",
                     path_.string(), "; lm_head.weight, ", embedding, "; set it to false)");
    found.erase("lm_head.weight");
  }
  const auto tensors = models::foreign_tensors(options);
  for (const models::ForeignTensor& tensor : tensors) wanted[tensor.name] = tensor.shape;
  Misfit(found, wanted).refuse(path_.string());
  by_parameter_.clear();
  for (const models::ForeignTensor& tensor : tensors) {
    by_parameter_[tensor.parameter].push_back(*by_name.at(tensor.name));
    transposed_[tensor.parameter] = tensor.transposed;
  }
}

at::Tensor HuggingFaceFolder::read(const Stored& stored) {
  if (open_name_ != stored.file) {
    open_ = std::make_unique<ckpt::SafetensorsReader>(path_ / stored.file, ckpt::Owner{});
    open_name_ = stored.file;
  }
  at::Tensor values = at::empty(stored.tensor.shape, stored.tensor.dtype);
  open_->read(open_->find(stored.tensor.name), 0,
              {static_cast<std::byte*>(values.mutable_data_ptr()), values.nbytes()});
  return values;
}

at::Tensor HuggingFaceFolder::read(const models::ParameterShape& parameter) {
  at::Tensor whole = at::empty(parameter.sizes, at::kFloat);
  std::int64_t row = 0;
  for (const Stored& stored : by_parameter_.at(parameter.name)) {
    const at::Tensor values = read(stored);
    const at::Tensor rows = transposed_.at(parameter.name) ? values.t() : values;
    whole.narrow(0, row, rows.size(0)).copy_(rows);
    row += rows.size(0);
  }
  return whole;
}

std::int64_t write_hugging_face(WeightSource& weights, const models::GptOptions& options, const fs::path& to,
                                const ExportOptions& how) {
  std::error_code ignored;
  if (fs::exists(to, ignored))
    throw UseError(kOperation, "the folder exists (", to.string(), "; remove it, or name another)");
  weights.check(options);
  const std::vector<Shard> shards = make_shards(options, how);
  const json config = models::foreign_config(options, how.dtype == c10::kFloat ? "float32" : "bfloat16");
  const fs::path whole = to.has_filename() ? to : to.parent_path();  // "out/" is "out"
  const fs::path beside = whole.parent_path() / ("." + whole.filename().string() + ".saving");
  ckpt::remove_folder(beside, {});  // of one that was cut off
  ckpt::make_folder(beside, {});
  try {
    ForeignRows rows(weights, options);
    json index = {{"metadata", {{"total_size", 0}}}, {"weight_map", json::object()}};
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const std::string name = shard_name(i, shards.size());
      write_shard(beside / name, shards[i], how.dtype, rows);
      bytes += shards[i].bytes;
      for (const models::ForeignTensor& tensor : shards[i].tensors) index["weight_map"][tensor.name] = name;
    }
    index["metadata"]["total_size"] = bytes;
    if (shards.size() > 1) ckpt::write_text(beside / HuggingFaceFolder::kIndex, index.dump(2) + "\n", {});
    ckpt::write_text(beside / HuggingFaceFolder::kConfig, config.dump(2) + "\n", {});
    ckpt::sync_folder(beside, {});
    ckpt::rename_folder(beside, whole, {});
    ckpt::sync_folder(whole.has_parent_path() ? whole.parent_path() : ".", {});
    return bytes;
  } catch (...) {
    try {
      ckpt::remove_folder(beside, {});
    } catch (const IoError&) {  // what went wrong first is what there is to say
    }
    throw;
  }
}

}  // namespace ballast::cli
