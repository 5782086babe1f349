#include "ballast/base/remove_tree.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ballast {
namespace {

namespace fs = std::filesystem;

fs::path new_folder() {
  std::string name = fs::temp_directory_path() / "ballast-remove-tree-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
  return name;
}

void write(const fs::path& file) { std::ofstream(file) << "text"; }

TEST(RemoveTree, RemovesFilesAndFoldersBelow) {
  const fs::path folder = new_folder();
  fs::create_directories(folder / "a" / "b");
  for (const fs::path& file : {folder / "1", folder / "a" / "2", folder / "a" / "b" / "3"}) write(file);
  EXPECT_FALSE(remove_tree(folder));
  EXPECT_FALSE(fs::exists(folder));
}

TEST(RemoveTree, RemovesLinksAndNotWhatTheyPointTo) {
  const fs::path folder = new_folder(), other = new_folder();
  write(other / "kept");
  fs::create_directory_symlink(other, folder / "link");
  EXPECT_FALSE(remove_tree(folder));
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_TRUE(fs::exists(other / "kept"));
  EXPECT_FALSE(remove_tree(other));
}

TEST(RemoveTree, TakesWhatIsNotThereForRemovedAndAFileForATree) {
  const fs::path folder = new_folder();
  EXPECT_FALSE(remove_tree(folder / "nothing"));
  write(folder / "file");
  EXPECT_FALSE(remove_tree(folder / "file"));
  EXPECT_FALSE(fs::exists(folder / "file"));
  EXPECT_FALSE(remove_tree(folder));
}

TEST(RemoveTree, TellsWhatItCouldNotRemove) {
  const fs::path folder = new_folder();
  write(folder / "file");
  EXPECT_EQ(remove_tree(folder / "file" / "below"), std::errc::not_a_directory);
  EXPECT_FALSE(remove_tree(folder));
}

}  // namespace
}  // namespace ballast
