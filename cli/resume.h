#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "cli/run_file.h"

namespace ballast::cli {

struct ResumePoint {
  std::filesystem::path folder;  // that holds checkpoints
  std::string tag;               // "": the latest
};

/// What the word behind --resume means: "auto": the latest in `folder`, nothing where it has none; a path to a folder
/// of checkpoints or to one of them; else a tag in `folder`.
std::optional<ResumePoint> find_resume_point(const std::string& word, const std::filesystem::path& folder);

/// The client's state in that checkpoint; null where it has none or can't be read, which a load says better.
nlohmann::json client_state_of(const ResumePoint& point);

/// Throws ConfigError with each key that differs where the client's state says that the checkpoint is of another model.
/// Dropout is free.
void refuse_other_model(const models::GptOptions& model, const nlohmann::json& client_state, const std::string& where);

/// Where the run saves, before its ranks meet: a run that goes on with its own checkpoints (--resume of its save
/// folder, of one that train.name saved into, or where "auto" found none yet) saves there, also where nothing else asks
/// for checkpoints. word: as given to --resume, "" for none. Throws UseError where that would mix the run's checkpoints
/// with another's, IoError where the folder can't be made or written to.
void settle_saving(RunFile& run, const std::string& word, const std::optional<ResumePoint>& from);

/// IoError with the remedy where the folder is one that Hugging Face's libraries have written, and no checkpoint.
void refuse_hugging_face(const std::filesystem::path& folder, const char* remedy);

}  // namespace ballast::cli
