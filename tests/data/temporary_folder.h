#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "ballast/base/error.h"
#include "ballast/base/remove_tree.h"

namespace ballast::data {

class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::filesystem::path& below = std::filesystem::temp_directory_path()) {
    std::string name = (below / "ballast-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() { remove_tree(path_); }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, const std::string& content) const {
    const auto file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file;
  }

 private:
  std::filesystem::path path_;
};

/// The text of the E that fn throws, with the folder's path shortened to "DIR".
template <class E, class Fn>
std::string error_text(const TemporaryFolder& folder, Fn fn) {
  try {
    fn();
  } catch (const E& e) {
    std::string text = e.what();
    for (auto at = text.find(folder.path().string()); at != std::string::npos; at = text.find(folder.path().string()))
      text.replace(at, folder.path().string().size(), "DIR");
    return text;
  }
  return "nothing was thrown";
}

}  // namespace ballast::data
