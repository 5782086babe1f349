#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace ballast::testing {

/// A place for one test's checkpoints, in memory where the system has such a place (a thousand saves that each wait for
/// a disk take minutes); removed at the end. Where ranks are processes it is one for all of them.
class SaveFolder {
 public:
  SaveFolder();
  ~SaveFolder();
  SaveFolder(const SaveFolder&) = delete;
  SaveFolder& operator=(const SaveFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  operator const std::filesystem::path&() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  /// Of a folder below it ("" for itself), sorted.
  std::vector<std::string> names(const std::string& below = "") const;

 private:
  std::filesystem::path path_;
};

}  // namespace ballast::testing
