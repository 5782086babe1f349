#include "tests/engine/support/save_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "ballast/base/remove_tree.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

bool ranks_are_processes() {
  const char* size = std::getenv("WORLD_SIZE");
  return size != nullptr && std::string(size) != "1";
}

// Ranks that are processes have one launcher and make their folders in the same order.
fs::path next(bool shared) {
  static int made = 0;
  const fs::path base = ::access("/dev/shm", W_OK) == 0 ? fs::path("/dev/shm") : fs::temp_directory_path();
  return base / ("ballast-save-test-" + std::to_string(shared ? getppid() : getpid()) + "-" + std::to_string(made++));
}

}  // namespace

SaveFolder::SaveFolder(int ranks) : shared_(ranks != 1 && ranks_are_processes()), path_(next(shared_)) {
  fs::create_directories(path_);
}

SaveFolder::~SaveFolder() {
  const char* rank = std::getenv("RANK");
  if (!shared_ || rank == nullptr || std::string(rank) == "0") remove_tree(path_);
}

std::vector<std::string> SaveFolder::names(const std::string& below) const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path_ / below)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace ballast::testing
