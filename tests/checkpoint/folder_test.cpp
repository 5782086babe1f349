// A checkpoint appears whole or not at all: every call to the system fails once, and is once the last one.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <fstream>

#include "ballast/base/log.h"
#include "ballast/checkpoint/system.h"
#include "tests/checkpoint/support.h"

namespace ballast::ckpt {
namespace {

namespace fs = std::filesystem;
using testing::FileFault;
using testing::FileFaults;

std::vector<std::string> names_in(const fs::path& path) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// Swallows the log while it lives.
struct Quiet {
  Quiet() {
    set_log_sink([this](LogLevel, const std::string& line) { lines += line + "\n"; });
  }
  ~Quiet() { set_log_sink({}); }
  std::string lines;
};

TEST(Folder, HoldsWhatWasSaved) {
  const TestFolder folder;
  save_small(folder / "new/runs", "global_step1", 1.5F);
  EXPECT_EQ(load_small(folder / "new/runs"), 1.5F);
  save_small(folder / "new/runs", "best", 2.5F, 0, 3);
  EXPECT_EQ(load_small(folder / "new/runs"), 2.5F);
  EXPECT_EQ(load_small(folder / "new/runs", "global_step1"), 1.5F);
  EXPECT_EQ(names_in(folder / "new/runs"), (std::vector<std::string>{"best", "global_step1", "latest"}));
  EXPECT_EQ(names_in(folder / "new/runs/global_step1"),
            (std::vector<std::string>{"manifest.json", "rank-00000-of-00002.safetensors",
                                      "rank-00001-of-00002.safetensors"}));
}

TEST(Folder, ReplacesATagAtOnce) {
  const TestFolder folder;
  save_small(folder.path(), "tag", 1);
  save_small(folder.path(), "tag", 2, 0, 4);
  EXPECT_EQ(load_small(folder.path()), 2);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"latest", "tag"}));
  EXPECT_EQ(names_in(folder / "tag").size(), 5U);
}

TEST(Folder, KeepsTheLastAndWhatHasANameOfItsOwn) {
  const TestFolder folder;
  std::ofstream(folder / "global_step0") << "a file of somebody else";
  save_small(folder.path(), "best", 0, 2);
  for (const int step : {1, 2, 30, 4}) {
    save_small(folder.path(), "global_step" + std::to_string(step), static_cast<float>(step), 2);
    // The order is that of the saves, whatever a copy made of the times of files.
    fs::last_write_time(folder / ("global_step" + std::to_string(step)) / "manifest.json",
                        fs::file_time_type::clock::now() - std::chrono::hours(step));
  }
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"best", "global_step0", "global_step30", "global_step4", "latest"}));
  save_small(folder.path(), "global_step5", 5, 1);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"best", "global_step0", "global_step5", "latest"}));
  EXPECT_EQ(load_small(folder.path()), 5);
}

TEST(Folder, KeepsWhatOtherRunsSaved) {
  const TestFolder folder;
  save_small(folder.path(), "global_step1", 1, 1, 2, "theirs");
  save_small(folder.path(), "global_step2", 2, 0, 2, "");  // doesn't say whose it is
  std::ofstream(folder / "global_step2/manifest.json") << "damaged";
  for (const int step : {3, 4}) save_small(folder.path(), "global_step" + std::to_string(step), 3, 1, 2, "ours");
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"global_step1", "global_step2", "global_step4", "latest"}));
  EXPECT_EQ(load_small(folder.path(), "global_step1"), 1);
}

TEST(Folder, LeavesWhatIsInTheWayOfLatest) {
  const TestFolder folder;
  fs::create_directories(folder / "latest/mine");
  const std::string error = error_of([&] { save_small(folder.path(), "tag", 1); });
  EXPECT_NE(error.find("not a file, which would name the newest"), std::string::npos) << error;
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"latest"});
  EXPECT_EQ(names_in(folder / "latest"), std::vector<std::string>{"mine"});
}

TEST(Folder, NamesWhatIsMissing) {
  const TestFolder folder;
  EXPECT_NE(error_of([&] { load_small(folder.path()); }).find("latest"), std::string::npos);
  EXPECT_NE(error_of([&] { load_small(folder / "nowhere"); }).find("nowhere"), std::string::npos);
  save_small(folder.path(), "one", 1);
  const std::string unknown = error_of([&] { load_small(folder.path(), "two"); });
  EXPECT_NE(unknown.find("there are: one"), std::string::npos) << unknown;
  EXPECT_NE(error_of([&] { load_small(folder.path(), "../x"); }).find("not a tag"), std::string::npos);
  std::ofstream(folder / "latest") << "../../etc";
  EXPECT_NE(error_of([&] { load_small(folder.path()); }).find("names no checkpoint"), std::string::npos);
}

TEST(Folder, FindsEveryFlippedByteAndEveryMissingFile) {
  const TestFolder folder;
  save_small(folder.path(), "tag", 1);
  for (const char* name : {"manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}) {
    const fs::path path = folder / "tag" / name;
    std::string content(fs::file_size(path), '\0');
    std::ifstream(path, std::ios::binary).read(content.data(), static_cast<std::streamsize>(content.size()));
    for (std::size_t at = 0; at < content.size(); at += content.size() < 1000 ? 1 : 97) {
      std::string other = content;
      other[at] = static_cast<char>(other[at] ^ 4);
      std::ofstream(path, std::ios::binary) << other;
      EXPECT_NE(error_of([&] { load_small(folder.path()); }).find(name), std::string::npos) << name << " " << at;
    }
    std::ofstream(path, std::ios::binary) << content + "x";
    EXPECT_NE(error_of([&] { load_small(folder.path()); }).find(name), std::string::npos) << name;
    fs::remove(path);
    EXPECT_NE(error_of([&] { load_small(folder.path()); }).find(name), std::string::npos) << name;
    std::ofstream(path, std::ios::binary) << content;
  }
  EXPECT_EQ(load_small(folder.path()), 1);
}

// What happens at the n-th call to the system: it fails, or the process ends before it.
enum class End { kFails, kDies };

// Saves over an older checkpoint while the n-th call goes wrong. Returns whether there was an n-th call.
bool save_with_trouble(const fs::path& path, const std::string& tag, int n, End end, std::string& error) {
  int calls = 0;
  bool reached = false;
  const FileFaults faults([&](FileOp op, const fs::path&) -> FileFault {
    if (op == FileOp::kRead) return {};
    ++calls;
    if (calls == n) reached = true;
    return (calls == n || (end == End::kDies && calls > n)) ? FileFault{n % 2 == 0 ? EIO : ENOSPC} : FileFault{};
  });
  error = error_of([&] { save_small(path, tag, 2, 1); });
  return reached;
}

void every_call_goes_wrong(const std::string& tag, End end) {
  const Quiet quiet;
  bool reached = true;
  int n = 1;
  for (; reached; ++n) {
    SCOPED_TRACE("call " + std::to_string(n));
    const TestFolder folder(TestFolder::On::kMemory);
    save_small(folder.path(), "global_step1", 1);
    std::string error;
    reached = save_with_trouble(folder.path(), tag, n, end, error);
    const float now = load_small(folder.path());
    if (error.empty()) {
      EXPECT_EQ(now, 2);
    } else if (now == 2) {  // between the checkpoint's appearance and the end of the save: complete as well
      EXPECT_EQ(load_small(folder.path(), tag), 2);
    } else {
      EXPECT_EQ(now, 1);
      EXPECT_EQ(load_small(folder.path(), "global_step1"), 1);
    }
    // The next save needs no help, and removes what is left.
    save_small(folder.path(), "global_step3", 3, 1);
    EXPECT_EQ(load_small(folder.path()), 3);
    EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"global_step3", "latest"}));
  }
  EXPECT_GT(n, 20);
}

TEST(Folder, SurvivesEveryCallThatFails) { every_call_goes_wrong("global_step2", End::kFails); }
TEST(Folder, SurvivesDeathAtEveryCall) { every_call_goes_wrong("global_step2", End::kDies); }
TEST(Folder, SurvivesEveryCallThatFailsWhileATagIsReplaced) { every_call_goes_wrong("global_step1", End::kFails); }
TEST(Folder, SurvivesDeathAtEveryCallWhileATagIsReplaced) { every_call_goes_wrong("global_step1", End::kDies); }

}  // namespace
}  // namespace ballast::ckpt
