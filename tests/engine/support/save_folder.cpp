#include "tests/engine/support/save_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "ballast/base/remove_tree.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

// Ranks that are processes have one launcher and make their folders in the same order.
fs::path next() {
  static int made = 0;
  const char* size = std::getenv("WORLD_SIZE");
  const bool processes = size != nullptr && std::string(size) != "1";
  const fs::path base = ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
  return base /
         ("ballast-save-test-" + std::to_string(processes ? getppid() : getpid()) + "-" + std::to_string(made++));
}

}  // namespace

SaveFolder::SaveFolder() : path_(next()) { fs::create_directories(path_); }

SaveFolder::~SaveFolder() {
  const char* rank = std::getenv("RANK");
  if (rank == nullptr || std::string(rank) == "0") remove_tree(path_);
}

std::vector<std::string> SaveFolder::names(const std::string& below) const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path_ / below)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace ballast::testing
