#include "cli/resume.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <system_error>

#include "ballast/base/error.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "cli/hugging_face.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool is_checkpoint(const fs::path& path) { return is_there(path / ckpt::Manifest::kFile); }

bool same_folder(const fs::path& a, const fs::path& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

/// Tags that a run gives, the one saved last at the end.
std::vector<std::string> saved_by_runs(const fs::path& folder) {
  std::vector<std::string> tags = ckpt::CheckpointFolder(folder, {}).tags();
  std::erase_if(tags, [](const std::string& tag) { return !ckpt::is_default_tag(tag); });
  return tags;
}

bool saved_by(const std::string& name, const ResumePoint& point) {
  const nlohmann::json state = client_state_of(point);
  const auto saved = nlohmann::json::json_pointer("/train/name");
  return state.is_object() && state.contains(saved) && state[saved] == name;
}

void refuse_mixing(const fs::path& folder) {
  const std::vector<std::string> tags = saved_by_runs(folder);
  if (!tags.empty())
    throw UseError("cli.train", "another run's checkpoints are there (", folder.string(), ", ", tags.size(),
                   " of them, the last ", tags.back(),
                   "; --resume goes on with that run; else give this one another train.name or --save DIR, or remove "
                   "the folder)");
}

}  // namespace

std::optional<ResumePoint> find_resume_point(const std::string& word, const fs::path& folder) {
  if (word == "auto") {
    if (is_there(folder / "latest")) return ResumePoint{folder, ""};
    // A run that was killed between its first checkpoint and the name of the latest.
    const std::vector<std::string> tags = saved_by_runs(folder);
    return tags.empty() ? std::nullopt : std::optional(ResumePoint{folder, tags.back()});
  }
  fs::path path = word;
  if (!path.has_filename()) path = path.parent_path();  // "runs/a/" is "runs/a"
  if (path.filename() == ckpt::Manifest::kFile) path = path.has_parent_path() ? path.parent_path() : ".";
  if (is_there(path / "latest")) return ResumePoint{path, ""};
  if (is_checkpoint(path)) {
    if (path.filename() == "." || path.filename() == "..") path = fs::canonical(path);  // a tag is a name
    return ResumePoint{path.has_parent_path() ? path.parent_path() : ".", path.filename().string()};
  }
  if (word.find('/') != std::string::npos) return ResumePoint{path, ""};  // the load says what is missing there
  return ResumePoint{folder, word};
}

nlohmann::json client_state_of(const ResumePoint& point) {
  try {
    return ckpt::CheckpointReader(ckpt::CheckpointFolder(point.folder, {}), point.tag, {}).manifest().client_state;
  } catch (const IoError&) {
    return nullptr;
  }
}

void refuse_other_model(const models::GptOptions& model, const nlohmann::json& client_state, const std::string& where) {
  if (!client_state.is_object() || !client_state.contains("model")) return;
  std::string differing;
  for (const ModelDifference& key : differences(model, model_from_json(client_state["model"])))
    if (key.name != "dropout")
      differing += (differing.empty() ? "model." : ", model.") + key.name + " = " + key.first + ", there " + key.second;
  if (!differing.empty())
    throw ConfigError("cli.resume", "the checkpoint is of another model (", where, "; ", differing,
                      "; a run goes on with the model that it began with)");
}

void settle_saving(RunFile& run, const std::string& word, const std::optional<ResumePoint>& from) {
  const bool own =
      !word.empty() && (!from || same_folder(from->folder, run.save_folder()) || saved_by(run.train.name, *from));
  if (own && run.save.folder.empty()) run.save.folder = (from ? from->folder : run.save_folder()).string();
  const fs::path folder = run.save_folder();
  const bool elsewhere = from && is_there(from->folder) && !same_folder(from->folder, folder);
  if (!from || elsewhere) refuse_mixing(folder);
  if (!run.save.on()) return;
  ckpt::make_folder(folder, {});
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    throw IoError("cli.train", "can't save there (", folder.string(), ": ", std::strerror(errno),
                  "; --save DIR names another folder)");
}

void refuse_hugging_face(const fs::path& folder, const char* remedy) {
  if (is_there(folder / HuggingFaceFolder::kConfig) && !is_there(folder / "latest") && !is_checkpoint(folder))
    throw IoError("cli.checkpoint", "not a checkpoint but weights of Hugging Face's libraries (", folder.string(), "; ",
                  remedy, ")");
}

}  // namespace ballast::cli
