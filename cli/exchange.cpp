// ballast checkpoint export and import: between checkpoints and what Hugging Face's libraries read.
#include <torch/torch.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/checkpoint/checkpoint_folder.h"
#include "ballast/checkpoint/element_type.h"
#include "cli/commands.h"
#include "cli/status.h"

namespace ballast::cli {
namespace {

constexpr const char* kImportedTag = "imported";

/// A checkpoint of a run that hasn't begun: weights, and nothing of an optimizer.
ckpt::Manifest new_manifest(const models::GptOptions& options) {
  ckpt::Manifest manifest;
  manifest.tag = kImportedTag;
  manifest.compute_dtype = "fp32";
  manifest.lr = {0};
  manifest.client_state = {{"model", model_to_json(options)}};
  for (const char* counter : {"global_steps", "applied_steps", "skipped_steps", "micro_steps", "global_samples"})
    manifest.counters[counter] = 0;
  for (const models::ParameterShape& shape : models::parameter_shapes(options)) {
    ckpt::ParameterRecord record;
    record.names = {shape.name};
    record.shape = shape.sizes;
    record.numel = c10::multiply_integers(shape.sizes);
    const std::string master = "master";
    record.states[master] = {{ckpt::rank_file_name(0, 1), master + "/" + shape.name, 0, record.numel}};
    manifest.parameters.push_back(std::move(record));
  }
  return manifest;
}

ckpt::Part write_weights(WeightSource& weights, const models::GptOptions& options, const ckpt::Manifest& manifest,
                         const std::filesystem::path& folder) {
  std::vector<ckpt::TensorSpec> specs;
  for (const ckpt::ParameterRecord& record : manifest.parameters)
    specs.push_back({record.states.at("master").front().tensor, c10::kFloat, {record.numel}});
  const std::string name = ckpt::rank_file_name(0, 1);
  ckpt::SafetensorsWriter writer(folder / name, specs, {{"format", "pt"}}, {});
  for (const models::ParameterShape& shape : models::parameter_shapes(options)) {
    const at::Tensor values = weights.read(shape).contiguous();
    writer.append({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
  }
  const ckpt::SafetensorsWriter::Digest digest = writer.finish();
  ckpt::Part part{{name, digest.bytes, digest.checksum}, {}};
  for (std::size_t i = 0; i < specs.size(); ++i) part.tensors[specs[i].name] = digest.tensors[i];
  return part;
}

// A run's `latest` would name the weights, and the run go on from those; and an import may be what a run began with.
void refuse_others(const ckpt::CheckpointFolder& folder) {
  const std::vector<std::string> tags = folder.tags();
  if (tags.empty()) return;
  const char* what = tags.back() == kImportedTag ? "an import is there already" : "a run's checkpoints are there";
  throw UseError("cli.import", what, " (", folder.of(tags.back()).string(),
                 "; choose another folder for --to, or remove that one)");
}

}  // namespace

int export_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, const ExportOptions& how,
                      const std::optional<models::GptOptions>& model) {
  const auto weights = open_checkpoint_weights(from);
  const std::optional<models::GptOptions> options = model ? model : weights->model();
  if (!options)
    throw UseError("cli.export", "the checkpoint doesn't say which model it is of (", weights->where(),
                   "; another program's? name a run file whose section \"model\" does: --config FILE; a model of "
                   "transformers is written by its own save_pretrained())");
  const std::int64_t bytes = write_hugging_face(*weights, *options, to, how);
  std::printf("%s: %s of weights in %s\n", to.string().c_str(), format_bytes(bytes).c_str(), ckpt::name_of(how.dtype));
  return 0;
}

int import_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to) {
  HuggingFaceFolder weights(from);
  const models::GptOptions options = weights.model().value();
  weights.check(options);
  const ckpt::CheckpointFolder folder(to, {});
  refuse_others(folder);
  const ckpt::Manifest manifest = new_manifest(options);
  folder.begin(manifest.tag);
  try {
    const ckpt::Part part = write_weights(weights, options, manifest, folder.unfinished(manifest.tag));
    folder.leave_part(manifest.tag, 0, 1, part);
    folder.commit(manifest, {part}, /*keep_last=*/0);
  } catch (...) {
    folder.abandon(manifest.tag);
    throw;
  }
  std::int64_t count = 0;
  for (const ckpt::ParameterRecord& record : manifest.parameters) count += record.numel;
  std::printf("%s: %s parameters; a run starts from them with --init\n", folder.of(manifest.tag).string().c_str(),
              format_count(static_cast<double>(count)).c_str());
  return 0;
}

}  // namespace ballast::cli
