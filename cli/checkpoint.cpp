#include <cstdio>

#include "ballast/base/bytes.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "ballast/checkpoint/element_type.h"
#include "cli/commands.h"
#include "cli/resume.h"
#include "cli/status.h"
#include "cli/text.h"

namespace ballast::cli {
namespace {

ckpt::CheckpointReader open(const std::filesystem::path& path) {
  refuse_hugging_face(path, "ballast checkpoint import makes a checkpoint of them");
  const ResumePoint point = find_resume_point(path.string() + "/", path).value();
  return {ckpt::CheckpointFolder(point.folder, {}), point.tag, {}};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

void print_parameter(const ckpt::ParameterRecord& parameter) {
  std::string names, states;
  for (const std::string& name : parameter.names) names.append(names.empty() ? "" : " = ").append(name);
  for (const auto& [key, pieces] : parameter.states)
    states.append(states.empty() ? "" : ", ").append(key).append(" in ").append(std::to_string(pieces.size()));
  std::printf("  %s  %s %s%s, %lld updates; pieces: %s\n", names.c_str(), ckpt::name_of(parameter.dtype),
              shape_text(parameter.shape).c_str(), parameter.trainable ? "" : " frozen",
              static_cast<long long>(parameter.steps), states.c_str());
}

std::string text_of(const nlohmann::json& value) {
  return value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// A line a member, an object's as "name value, name value".
void print_client_state(const nlohmann::json& state) {
  if (!state.is_object()) {
    std::printf("client state: %s\n", text_of(state).c_str());
    return;
  }
  std::printf("client state:\n");
  for (const auto& [key, value] : state.items()) {
    std::string text;
    if (value.is_object())
      for (const auto& [name, inner] : value.items())
        text += (text.empty() ? "" : ", ") + printable(name) + " " + text_of(inner);
    std::printf("  %s: %s\n", printable(key).c_str(), text.empty() ? text_of(value).c_str() : text.c_str());
  }
}

}  // namespace

int inspect_checkpoint(const std::filesystem::path& path, bool names) {
  const ckpt::CheckpointReader reader = open(path);
  const ckpt::Manifest& manifest = reader.manifest();
  std::int64_t elements = 0, frozen = 0, bytes = 0;
  for (const ckpt::ParameterRecord& parameter : manifest.parameters)
    (parameter.trainable ? elements : frozen) += parameter.numel;
  for (const ckpt::FileRecord& file : manifest.files) bytes += file.bytes;
  std::printf("%s\n", reader.path().string().c_str());
  std::printf("saved by %d %s, stage %d, %s, %s\n", manifest.world, manifest.world == 1 ? "rank" : "ranks",
              manifest.stage, manifest.compute_dtype.c_str(), manifest.optimizer.c_str());
  for (const auto& [name, value] : manifest.counters)
    std::printf("%s %lld\n", name.c_str(), static_cast<long long>(value));
  std::printf("loss scale %.10g, learning rates", manifest.loss_scale);
  for (const double rate : manifest.lr) std::printf(" %.6g", rate);
  std::printf("\nparameters: %zu, %s trainable elements, %s frozen; buffers: %zu\n", manifest.parameters.size(),
              format_count(static_cast<double>(elements)).c_str(), format_count(static_cast<double>(frozen)).c_str(),
              manifest.buffers.size());
  if (manifest.window)
    std::printf("a window that isn't over: %lld backwards\n", static_cast<long long>(manifest.window->backwards));
  if (!manifest.client_state.is_null()) print_client_state(manifest.client_state);
  std::printf("files: %zu, %s\n", manifest.files.size(), format_bytes(bytes).c_str());
  for (const ckpt::ParameterRecord& parameter : manifest.parameters)
    if (names) print_parameter(parameter);
  return 0;
}

int verify_checkpoint(const std::filesystem::path& path) {
  ckpt::CheckpointReader reader = open(path);
  for (const ckpt::FileRecord& file : reader.manifest().files) {
    reader.verify(file);
    std::printf("%s: %s, as written\n", file.name.c_str(), format_bytes(file.bytes).c_str());
  }
  std::printf("%s: whole\n", reader.path().string().c_str());
  return 0;
}

}  // namespace ballast::cli
