#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace ballast::testing {

/// A place for one test's checkpoints, in memory where the system has such a place (a thousand saves that each wait for
/// a disk take minutes); removed at the end. Where ranks are processes it is one for all of them, but for worlds of one
/// rank (`ranks` 1), which each process has for itself.
class SaveFolder {
 public:
  explicit SaveFolder(int ranks = 0);
  ~SaveFolder();
  SaveFolder(const SaveFolder&) = delete;
  SaveFolder& operator=(const SaveFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  operator const std::filesystem::path&() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  /// Of a folder below it ("" for itself), sorted.
  std::vector<std::string> names(const std::string& below = "") const;

 private:
  bool shared_;
  std::filesystem::path path_;
};

}  // namespace ballast::testing
