#include "ballast/checkpoint/storage.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>

#include "ballast/checkpoint/system.h"
#include "tests/checkpoint/support.h"

namespace ballast::ckpt {
namespace {

using testing::FileFault;
using testing::FileFaults;
using ::testing::Test;

std::vector<std::byte> read_all(const std::filesystem::path& path) {
  InputFile file(path, {0});
  std::vector<std::byte> data(static_cast<std::size_t>(file.bytes()));
  file.read(0, data);
  return data;
}

TEST(Files, KeepEveryLengthAroundAPageAndABlock) {
  const TestFolder folder;
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{4095}, std::int64_t{4096},
                                   std::int64_t{4097}, kBlock - 1, kBlock, kBlock + 1, 9 * kBlock + 12345}) {
    const auto data = some_bytes(static_cast<std::size_t>(bytes));
    OutputFile file(folder / "file", {0});
    for (std::size_t at = 0; at < data.size(); at += 777'777)
      file.write(std::span(data).subspan(at, std::min<std::size_t>(777'777, data.size() - at)));
    EXPECT_EQ(file.bytes(), bytes);
    file.finish();
    EXPECT_EQ(static_cast<std::int64_t>(std::filesystem::file_size(folder / "file")), bytes);
    EXPECT_TRUE(read_all(folder / "file") == data) << bytes;
  }
}

TEST(Files, AreReadInAnyOrder) {
  const TestFolder folder;
  const auto data = some_bytes(static_cast<std::size_t>(5 * kBlock + 17));
  OutputFile out(folder / "file", {0});
  out.write(data);
  out.finish();
  InputFile file(folder / "file", {0});
  std::vector<std::byte> part(100'000);
  for (const std::int64_t at :
       {4 * kBlock, std::int64_t{0}, kBlock - 50'000, 3 * kBlock + 1, 2 * kBlock, 5 * kBlock - 99'983}) {
    file.read(at, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), data.begin() + at)) << at;
  }
  file.read(5 * kBlock + 17, {});
  for (const std::int64_t at : {5 * kBlock, 6 * kBlock, std::int64_t{-1}})
    EXPECT_NE(error_of([&] { file.read(at, part); }).find("ends too early"), std::string::npos) << at;
}

TEST(Files, ResumeWhatComesBackShortOrInterrupted) {
  const TestFolder folder;
  const auto data = some_bytes(static_cast<std::size_t>(2 * kBlock + 5000));
  int calls = 0;
  const FileFaults faults([&](FileOp op, const std::filesystem::path&) -> FileFault {
    if (op != FileOp::kWrite && op != FileOp::kRead) return {};
    return ++calls % 3 == 0 ? FileFault{EINTR} : calls % 3 == 1 ? FileFault{0, 1'000'003} : FileFault{};
  });
  OutputFile out(folder / "file", {0});
  out.write(data);
  out.finish();
  EXPECT_TRUE(read_all(folder / "file") == data);
  EXPECT_GT(calls, 6);
}

TEST(Files, SayWhatFailedAndWhatHelps) {
  const TestFolder folder;
  const auto data = some_bytes(static_cast<std::size_t>(6 * kBlock));
  const FileFaults faults([&](FileOp op, const std::filesystem::path&) -> FileFault {
    return op == FileOp::kWrite ? FileFault{ENOSPC} : FileFault{};
  });
  OutputFile file(folder / "file", {3});
  const std::string first = error_of([&] {
    file.write(data);
    file.finish();
  });
  for (const char* part : {"[checkpoint.write] No space left on device", "file", "rank 3", "free space there"})
    EXPECT_NE(first.find(part), std::string::npos) << first;
  EXPECT_EQ(error_of([&] { file.write(data); }), first);
  EXPECT_EQ(error_of([&] { file.finish(); }), first);
}

TEST(Files, ThatAreCutWhileTheyAreReadAreErrors) {
  const TestFolder folder;
  const auto data = some_bytes(static_cast<std::size_t>(3 * kBlock));
  OutputFile out(folder / "file", {0});
  out.write(data);
  out.finish();
  InputFile file(folder / "file", {1});
  std::filesystem::resize_file(folder / "file", static_cast<std::uintmax_t>(kBlock + 100));
  std::vector<std::byte> part(static_cast<std::size_t>(kBlock));
  file.read(0, part);
  const std::string error = error_of([&] { file.read(kBlock, part); });
  EXPECT_NE(error.find("got 100, want 4194304 bytes"), std::string::npos) << error;
}

TEST(Files, ThatAreNoneAreErrors) {
  const TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);  // which nobody writes to
  for (const auto& path : {folder / "missing", folder.path(), folder / "pipe"}) {
    const std::string error = error_of([&] { InputFile(path, {2}); });
    EXPECT_NE(error.find(path.string()), std::string::npos) << error;
    EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
  }
}

TEST(Texts, AreReplacedAtOnceAndHaveALimit) {
  const TestFolder folder;
  write_text(folder / "latest", "one", {});
  write_text(folder / "latest", "second", {});
  EXPECT_EQ(read_text(folder / "latest", 6, {}), "second");
  EXPECT_NE(error_of([&] { read_text(folder / "latest", 5, {}); }).find("got 6, most 5"), std::string::npos);
  {
    const FileFaults faults([&](FileOp op, const std::filesystem::path&) -> FileFault {
      return op == FileOp::kRename ? FileFault{EIO} : FileFault{};
    });
    EXPECT_NE(error_of([&] { write_text(folder / "latest", "third", {}); }), "");
  }
  EXPECT_EQ(read_text(folder / "latest", 6, {}), "second");
}

TEST(Folders, AreMadeWithParentsAndRemovedWithContents) {
  const TestFolder folder;
  make_folder(folder / "a/b/c/", {});
  make_folder(folder / "a/b/c", {});
  std::ofstream(folder / "a/b/file") << "x";
  std::filesystem::create_symlink("/", folder / "a/b/root");
  EXPECT_EQ(list_folder(folder / "a/b", {}), (std::vector<std::string>{"c", "file", "root"}));
  remove_folder(folder / "a", {});
  remove_folder(folder / "a", {});
  EXPECT_TRUE(list_folder(folder / "a", {}).empty());
  EXPECT_TRUE(std::filesystem::exists("/tmp") || std::filesystem::exists("/usr"));
}

TEST(Folders, ChangePlacesInOneStep) {
  const TestFolder folder;
  make_folder(folder / "new", {});
  std::ofstream(folder / "new/mark") << "x";
  move_into_place(folder / "new", folder / "tag", {});
  EXPECT_FALSE(std::filesystem::exists(folder / "new"));
  make_folder(folder / "new", {});
  move_into_place(folder / "new", folder / "tag", {});
  EXPECT_TRUE(std::filesystem::exists(folder / "new/mark"));
  EXPECT_FALSE(std::filesystem::exists(folder / "tag/mark"));
}

}  // namespace
}  // namespace ballast::ckpt
