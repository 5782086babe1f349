#include "cli/resume.h"

#include <system_error>

#include "ballast/checkpoint/manifest.h"

namespace ballast::cli {

std::optional<ResumePoint> find_resume_point(const std::string& word, const std::filesystem::path& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (word == "auto") {
    if (!fs::exists(folder / "latest", ignored)) return std::nullopt;
    return ResumePoint{folder, ""};
  }
  fs::path path = word;
  if (!path.has_filename()) path = path.parent_path();  // "runs/a/" is "runs/a"
  if (fs::exists(path / "latest", ignored)) return ResumePoint{path, ""};
  if (fs::exists(path / ckpt::Manifest::kFile, ignored))
    return ResumePoint{path.has_parent_path() ? path.parent_path() : ".", path.filename().string()};
  if (word.find('/') != std::string::npos) return ResumePoint{path, ""};  // the load says what is missing there
  return ResumePoint{folder, word};
}

}  // namespace ballast::cli
