#include "cli/weights.h"

#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>

#include "ballast/base/error.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "cli/hugging_face.h"
#include "cli/resume.h"
#include "cli/run_file.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOperation = "cli.weights";

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

std::string join(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kMost) text += " and " + std::to_string(names.size() - kMost) + " more";
  return text;
}

/// The weights of a checkpoint, its fp32 masters where it has those.
class CheckpointWeights final : public WeightSource {
 public:
  explicit CheckpointWeights(const ResumePoint& point)
      : reader_(ckpt::CheckpointFolder(point.folder, {}), point.tag, {}) {
    for (const ckpt::ParameterRecord& record : reader_.manifest().parameters)
      for (const std::string& name : record.names) records_[name] = &record;
  }

  std::string where() const override { return reader_.path().string(); }

  std::optional<models::GptOptions> model() const override {
    const nlohmann::json& state = reader_.manifest().client_state;
    if (!state.is_object() || !state.contains("model")) return std::nullopt;
    return model_from_json(state["model"]);
  }

  void check(const models::GptOptions& options) override {
    refuse_too_many_layers(options.layers, records_.size(), where());
    Misfit::Shapes found, wanted;
    for (const auto& [name, record] : records_) found[name] = record->shape;
    for (const models::ParameterShape& shape : models::parameter_shapes(options)) wanted[shape.name] = shape.sizes;
    Misfit(found, wanted).refuse(where());
  }

  at::Tensor read(const models::ParameterShape& parameter) override {
    const ckpt::ParameterRecord& record = *records_.at(parameter.name);
    const auto masters = record.states.find("master");
    const bool trainable = masters != record.states.end();
    at::Tensor values = at::empty(parameter.sizes, trainable ? at::kFloat : record.dtype);
    reader_.read(trainable ? masters->second : record.states.at("param"), values.scalar_type(), 0, values.numel(),
                 {static_cast<std::byte*>(values.mutable_data_ptr()), values.nbytes()});
    return values.to(at::kFloat);
  }

 private:
  ckpt::CheckpointReader reader_;
  std::map<std::string, const ckpt::ParameterRecord*> records_;  // by each of its names
};

}  // namespace

void refuse_too_many_layers(std::int64_t layers, std::size_t tensors, const std::string& where) {
  if (layers > static_cast<std::int64_t>(tensors))
    throw UseError(kOperation, "the weights are of another model (", where, "; ", tensors, " tensors, want ", layers,
                   " layers)");
}

Misfit::Misfit(const Shapes& found, const Shapes& wanted) {
  for (const auto& [name, shape] : wanted) {
    const auto other = found.find(name);
    if (other == found.end())
      missing_.push_back(name);
    else if (other->second != shape)
      misshaped_.push_back(name + " (" + shape_text(other->second) + ", want " + shape_text(shape) + ")");
  }
  for (const auto& [name, shape] : found)
    if (!wanted.contains(name)) unexpected_.push_back(name);
}

void Misfit::refuse(const std::string& where) const {
  std::string what;
  const auto add = [&what](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) what += (what.empty() ? "" : "; ") + (title + join(names));
  };
  add("they lack ", missing_);
  add("the model has no ", unexpected_);
  add("of other shapes are ", misshaped_);
  if (!what.empty()) throw UseError(kOperation, "the weights are of another model (", where, "; ", what, ")");
}

std::unique_ptr<WeightSource> open_checkpoint_weights(const fs::path& path) {
  refuse_hugging_face(path, "they are what an export would write");
  return std::make_unique<CheckpointWeights>(find_resume_point(path.string() + "/", path).value());
}

std::unique_ptr<WeightSource> open_weights(const fs::path& path) {
  std::error_code ignored;
  if (fs::exists(path / HuggingFaceFolder::kConfig, ignored)) return std::make_unique<HuggingFaceFolder>(path);
  if (fs::exists(path / "latest", ignored) || fs::exists(path / ckpt::Manifest::kFile, ignored))
    return open_checkpoint_weights(path);
  throw IoError(kOperation, "no weights here (", path.string(), " has neither ", HuggingFaceFolder::kConfig,
                " beside safetensors files, nor a checkpoint)");
}

void load(WeightSource& weights, models::GptImpl& model) {
  const torch::NoGradGuard no_grad;
  auto parameters = model.named_parameters();
  for (const models::ParameterShape& shape : models::parameter_shapes(model.options))
    parameters[shape.name].copy_(weights.read(shape));
}

}  // namespace ballast::cli
