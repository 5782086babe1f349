// Folders of runs that live and of runs that were killed, with real processes.
#include "ballast/tiers/run_folder.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <vector>

#include "ballast/base/log.h"
#include "ballast/tiers/swap_file.h"
#include "tests/data/temporary_folder.h"
#include "tests/tiers/aligned.h"

namespace ballast::tiers {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> entries(const fs::path& folder) {
  return {fs::directory_iterator(folder), fs::directory_iterator()};
}

class Log {
 public:
  Log() {
    set_log_sink([this](LogLevel, const std::string& line) { lines.push_back(line); });
  }
  ~Log() { set_log_sink({}); }
  std::vector<std::string> lines;
};

TEST(RunFolder, IsUniqueNamedByItsRankAndGoesWithTheObject) {
  const data::TemporaryFolder folder;
  {
    const RunFolder a(folder.path(), 0), b(folder.path(), 3), c(folder.path(), 3);
    EXPECT_EQ(entries(folder.path()).size(), 3u);
    EXPECT_NE(b.path(), c.path());
    const std::string part = "-" + std::to_string(::getpid()) + "-r3-";
    EXPECT_TRUE(b.path().filename().string().starts_with("ballast-")) << b.path();
    EXPECT_NE(b.path().filename().string().find(part), std::string::npos) << b.path();
    std::ofstream(b.path() / "swap.0") << "states";
  }
  EXPECT_TRUE(entries(folder.path()).empty());
}

TEST(RunFolder, WhereItCannotBeSaysWhy) {
  const data::TemporaryFolder folder;
  folder.write("file", "");
  const auto error = [&](const fs::path& path) {
    return data::error_text<IoError>(folder, [&] { RunFolder(path, 2); });
  };
  EXPECT_EQ(error(folder.path() / "gone"),
            "[tiers.run_folder] nvme_path does not exist (DIR/gone, rank 2; create it, or name a folder on a local "
            "disk)");
  EXPECT_EQ(error(folder.path() / "file"),
            "[tiers.run_folder] nvme_path is not a folder (DIR/file, rank 2; name a folder on a local disk)");
  const std::string too_long = error(folder.path() / std::string(300, 'x'));
  EXPECT_TRUE(too_long.starts_with("[tiers.run_folder] File name too long (looking for nvme_path ")) << too_long;
  const std::string read_only = error("/proc");
  EXPECT_TRUE(read_only.starts_with("[tiers.run_folder] ")) << read_only;
  EXPECT_TRUE(read_only.ends_with("rank 2; nvme_path must be writable, with space)")) << read_only;
}

/// A process that holds a folder with a swap file of 1 MiB until it is killed.
class OtherRun {
 public:
  explicit OtherRun(const fs::path& nvme_path) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    child_ = ::fork();
    if (child_ == 0) {
      const RunFolder folder(nvme_path, 0);
      SwapFile file(folder.path() / "swap.0", {1 << 20}, {});
      const Aligned data(1 << 20, 1);
      file.start_write(0, data.span());
      const ssize_t told = ::write(ends[1], "x", 1);  // mid-swap
      for (;;) ::pause();
      ::_exit(static_cast<int>(told));
    }
    char ready = 0;
    EXPECT_EQ(::read(ends[0], &ready, 1), 1);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void kill() {
    ::kill(child_, SIGKILL);
    ::waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_ = -1;
};

TEST(RunFolder, OfAKilledRunIsRemovedByTheNextAndALivingOneIsKept) {
  const data::TemporaryFolder folder;
  OtherRun living(folder.path()), killed(folder.path());
  killed.kill();
  EXPECT_EQ(entries(folder.path()).size(), 2u);
  {
    const Log log;
    const RunFolder next(folder.path(), 0);
    EXPECT_EQ(entries(folder.path()).size(), 2u) << "the living one's and the new one";
    ASSERT_EQ(log.lines.size(), 1u);
    EXPECT_EQ(log.lines[0], "tiers: removed 1 folder of dead runs in " + folder.path().string() + " (1.00 MiB freed)");
  }
  living.kill();
  const Log log;
  const RunFolder last(folder.path(), 0);
  EXPECT_EQ(entries(folder.path()).size(), 1u);
  EXPECT_EQ(log.lines.size(), 1u);
}

TEST(RunFolder, LeavesAloneWhatIsNotAFolderOfARunOfThisHost) {
  const data::TemporaryFolder folder;
  folder.write("ballast-notes/thesis.txt", "mine");              // no marker
  folder.write("ballast-copy/ballast.run", "something else\n");  // another program's
  folder.write("ballast-far/ballast.run",
               "Ballast keeps the states of a running training here; it deletes this folder itself.\nfarhost\nboot\n");
  folder.write("data/ballast.run",
               "Ballast keeps the states of a running training here; it deletes this folder itself.\n");
  const Log log;
  const RunFolder mine(folder.path(), 0);
  EXPECT_EQ(entries(folder.path()).size(), 5u);
  EXPECT_TRUE(fs::exists(folder.path() / "ballast-notes/thesis.txt"));
  EXPECT_TRUE(log.lines.empty());
}

}  // namespace
}  // namespace ballast::tiers
