#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace ballast::cli {

struct ResumePoint {
  std::filesystem::path folder;  // that holds checkpoints
  std::string tag;               // "": the latest
};

/// What the word behind --resume means: "auto": the latest in `folder`, nothing where it has none; a path to a folder
/// of checkpoints or to one of them; else a tag in `folder`.
std::optional<ResumePoint> find_resume_point(const std::string& word, const std::filesystem::path& folder);

}  // namespace ballast::cli
