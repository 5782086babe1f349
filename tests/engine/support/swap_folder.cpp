#include "tests/engine/support/swap_folder.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <system_error>

#include "ballast/base/remove_tree.h"

namespace ballast::testing {
namespace {

namespace fs = std::filesystem;

bool ranks_are_processes() {
  const char* size = std::getenv("WORLD_SIZE");
  return size != nullptr && std::string(size) != "1";
}

// Ranks that are processes have one launcher.
struct Folder {
  fs::path path = fs::temp_directory_path() /
                  ("ballast-engine-test-" + std::to_string(ranks_are_processes() ? getppid() : getpid()));
  Folder() { fs::create_directories(path); }
  ~Folder() {
    std::error_code ignored;
    if (ranks_are_processes()) {
      fs::remove(path, ignored);  // empty: the last rank does
    } else {
      remove_tree(path);
    }
  }
};

}  // namespace

const fs::path& swap_folder() {
  static const Folder folder;
  return folder.path;
}

void expect_nothing_swapped() {
  if (ranks_are_processes()) return;  // others may still be at it
  for (const auto& left : fs::directory_iterator(swap_folder())) ADD_FAILURE() << "left behind: " << left.path();
}

}  // namespace ballast::testing
