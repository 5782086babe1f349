// A file system that is full for real: a small tmpfs, which only root can mount; elsewhere the program exits with 77.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "ballast/base/error.h"
#include "ballast/tiers/swap_file.h"
#include "tests/data/temporary_folder.h"
#include "tests/tiers/aligned.h"

namespace ballast::tiers {
namespace {

const data::TemporaryFolder* small = nullptr;  // 8 MiB

std::int64_t free_bytes() { return static_cast<std::int64_t>(std::filesystem::space(small->path()).available); }

TEST(FullDisk, AFileThatDoesNotFitIsRefusedAtItsStartAndLeavesTheDiskAsItWas) {
  const std::int64_t before = free_bytes();
  const std::string error = data::error_text<IoError>(*small, [] {
    SwapFile(small->path() / "swap.0", {6 << 20, 6 << 20}, {}, 2);
  });
  EXPECT_EQ(error,
            "[tiers.reserve] No space left on device (DIR/swap.0 needs 12.0 MiB, free are 8.00 MiB, rank 2; free space "
            "there or choose another nvme_path)");
  EXPECT_EQ(free_bytes(), before);
  EXPECT_FALSE(std::filesystem::exists(small->path() / "swap.0"));
}

/// Reserved space can't run out, so the test takes it away: a hole in the file, and the rest of the disk filled.
TEST(FullDisk, ADiskThatIsFullAtAWriteIsAnErrorOfThatWrite) {
  for (const bool uring : {true, false}) {
    const std::int64_t chunk = 2 << 20;
    const auto path = small->path() / "swap.0";
    SwapFile file(path, {chunk, chunk}, {.block_size = 1 << 18, .uring = uring}, 2);
    const Aligned data(chunk, 1);
    file.start_write(0, data.span());
    file.finish(0);
    const int fd = ::open(path.c_str(), O_WRONLY);
    ASSERT_EQ(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, chunk, chunk), 0);
    ::close(fd);
    const auto filler = small->path() / "filler";
    const int fill = ::open(filler.c_str(), O_WRONLY | O_CREAT, 0600);
    ASSERT_EQ(::posix_fallocate(fill, 0, free_bytes() - (1 << 19)), 0);
    ::close(fill);
    const std::string error = data::error_text<IoError>(*small, [&] {
      file.start_write(1, data.span());
      file.finish(1);
    });
    EXPECT_TRUE(error.starts_with("[tiers.write] No space left on device (DIR/swap.0, chunk 1 at byte 2097152, failed"))
        << error;
    EXPECT_TRUE(error.ends_with("want 2097152 bytes; rank 2; free space there or choose another nvme_path)")) << error;
    std::filesystem::remove(filler);
  }
}

}  // namespace
}  // namespace ballast::tiers

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const ballast::data::TemporaryFolder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=8m") != 0) {
    std::printf("skip: mounting a small tmpfs: %s\n", std::strerror(errno));
    return 77;
  }
  ballast::tiers::small = &folder;
  const int status = RUN_ALL_TESTS();
  ::umount(folder.path().c_str());
  return status;
}
