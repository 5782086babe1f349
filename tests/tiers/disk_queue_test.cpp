// The queue alone: bytes land where they should, completions carry their tags, refusals have a reason.
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "tests/tiers/aligned.h"
#include "tests/tiers/places.h"

namespace ballast::tiers {
namespace {

class Queue : public AtPlace {};

std::unique_ptr<DiskQueue> make(const DiskFile& file, const DiskOptions& options) {
  std::string why_not;
  auto queue = options.uring ? make_uring_queue(file, options.queue_depth, why_not) : nullptr;
  return queue ? std::move(queue) : make_thread_queue(file, options.queue_depth, options.threads);
}

TEST_P(Queue, MovesWhatItIsAskedForAndGivesTagsBack) {
  DiskFile file(this->file(), 8 * kDiskAlign, 0);
  const auto queue = make(file, options());
  const Aligned written(4 * kDiskAlign, 1), read(4 * kDiskAlign, 2);
  EXPECT_EQ(queue->reap(true), std::nullopt) << "nothing is in flight";
  for (const DiskOp op : {DiskOp::kWrite, DiskOp::kRead}) {
    const Aligned& buffer = op == DiskOp::kWrite ? written : read;
    std::vector<DiskRequest> requests;
    for (std::int64_t i = 0; i < 4; ++i) {  // each piece at the mirrored place of the file's second half
      requests.push_back({.op = op,
                          .offset = (7 - i) * kDiskAlign,
                          .data = &buffer[static_cast<std::size_t>(i * kDiskAlign)],
                          .bytes = kDiskAlign,
                          .tag = static_cast<std::uint64_t>(100 + i)});
    }
    queue->submit(requests);
    EXPECT_EQ(queue->in_flight(), 4);
    std::set<std::uint64_t> tags;
    while (const auto completion = queue->reap(true)) {
      EXPECT_EQ(completion->result, kDiskAlign);
      tags.insert(completion->tag);
    }
    EXPECT_EQ(tags, (std::set<std::uint64_t>{100, 101, 102, 103}));
    EXPECT_EQ(queue->in_flight(), 0);
  }
  EXPECT_TRUE(written == read);
}

TEST_P(Queue, ReportsWhatTheSystemSays) {
  DiskFile file(this->file(), kDiskAlign, 0);
  const auto queue = make(file, options());
  const Aligned buffer(2 * kDiskAlign);
  const auto result = [&](std::int64_t offset, std::int64_t bytes) {
    const DiskRequest request{.op = DiskOp::kRead, .offset = offset, .data = &buffer[0], .bytes = bytes, .tag = 1};
    queue->submit({&request, 1});
    return queue->reap(true)->result;
  };
  EXPECT_EQ(result(0, 2 * kDiskAlign), kDiskAlign) << "short: the file ends";
  EXPECT_EQ(result(kDiskAlign, kDiskAlign), 0) << "behind the end";
  EXPECT_EQ(result(-kDiskAlign, kDiskAlign), -EINVAL);
}

TEST_P(Queue, RegisteredBuffersAreUsedAndOthersStillWork) {
  DiskFile file(this->file(), 4 * kDiskAlign, 0);
  const auto queue = make(file, options());
  const Aligned a(2 * kDiskAlign, 1), b(kDiskAlign, 2), other(kDiskAlign, 3), back(4 * kDiskAlign, 4);
  const std::vector<std::span<std::byte>> buffers{a.span(), b.span()};
  const bool registered = queue->register_buffers(buffers);
  EXPECT_TRUE(registered || queue->name() == std::string("threads") || ::geteuid() != 0);
  std::int64_t offset = 0;
  std::vector<DiskRequest> requests;
  for (const Aligned* buffer : {&a, &b, &other}) {
    const auto bytes = static_cast<std::int64_t>(buffer->span().size());
    requests.push_back({.op = DiskOp::kWrite, .offset = offset, .data = &(*buffer)[0], .bytes = bytes, .tag = 0});
    offset += bytes;
  }
  queue->submit(requests);
  while (const auto completion = queue->reap(true)) EXPECT_GT(completion->result, 0);
  // Again, and now the other one: the last call counts.
  const std::vector<std::span<std::byte>> again{back.span()};
  EXPECT_EQ(queue->register_buffers(again), registered);
  const DiskRequest all{.op = DiskOp::kRead, .offset = 0, .data = &back[0], .bytes = 4 * kDiskAlign, .tag = 0};
  queue->submit({&all, 1});
  EXPECT_EQ(queue->reap(true)->result, 4 * kDiskAlign);
  const auto part = [&](std::int64_t page, std::int64_t pages) {
    return back.span().subspan(static_cast<std::size_t>(page * kDiskAlign),
                               static_cast<std::size_t>(pages * kDiskAlign));
  };
  EXPECT_TRUE(std::ranges::equal(part(0, 2), a.span()));
  EXPECT_TRUE(std::ranges::equal(part(2, 1), b.span()));
  EXPECT_TRUE(std::ranges::equal(part(3, 1), other.span()));
}

/// Exit status of fn in a child that is nobody and may lock no memory.
int as_nobody(const std::filesystem::path& folder, const std::function<bool()>& fn) {
  std::filesystem::permissions(folder, std::filesystem::perms::all);
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none{0, 0};
    const bool dropped = ::setrlimit(RLIMIT_MEMLOCK, &none) == 0 && ::setgroups(0, nullptr) == 0 &&
                         ::setgid(65534) == 0 && ::setuid(65534) == 0;
    ::_exit(dropped && fn() ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_P(Queue, WithoutTheRightToLockMemoryBuffersStayUnregistered) {
  if (::geteuid() != 0) return;  // only root can become nobody
  const int status = as_nobody(folder_->path(), [&] {
    DiskFile file(this->file(), kDiskAlign, 0);
    const auto queue = make(file, options());
    const Aligned buffer(kDiskAlign, 1);
    const std::vector<std::span<std::byte>> buffers{buffer.span()};
    const bool registered = queue->register_buffers(buffers);
    const DiskRequest request{.op = DiskOp::kWrite, .offset = 0, .data = &buffer[0], .bytes = kDiskAlign, .tag = 0};
    queue->submit({&request, 1});
    return !registered && queue->reap(true)->result == kDiskAlign;
  });
  EXPECT_EQ(status, 0);
}

TEST_P(Queue, MayDieWithRequestsInFlight) {
  DiskFile file(this->file(), 64 * kDiskAlign, 0);
  const Aligned buffer(64 * kDiskAlign, 1);
  const auto queue = make(file, options());
  std::vector<DiskRequest> requests;
  for (std::int64_t i = 0; i < 4; ++i) {
    requests.push_back({.op = DiskOp::kWrite,
                        .offset = i * 16 * kDiskAlign,
                        .data = &buffer[static_cast<std::size_t>(i * 16 * kDiskAlign)],
                        .bytes = 16 * kDiskAlign,
                        .tag = 0});
  }
  queue->submit(requests);
}

// As ranks do that are threads: the memory of one's queue is soon that of another's.
TEST_P(Queue, ThreadsMakeAndEndTheirOwn) {
  const auto moves = [this](const std::string& name, std::uint32_t seed) {
    DiskFile file(this->file(name), kDiskAlign, 0);
    for (int turn = 0; turn < 20; ++turn) {
      const auto queue = make(file, options());
      const Aligned written(kDiskAlign, seed), read(kDiskAlign, seed + 1);
      for (const DiskOp op : {DiskOp::kWrite, DiskOp::kRead}) {
        const Aligned& buffer = op == DiskOp::kWrite ? written : read;
        const DiskRequest request{.op = op, .offset = 0, .data = &buffer[0], .bytes = kDiskAlign, .tag = 0};
        queue->submit({&request, 1});
        EXPECT_EQ(queue->reap(true)->result, kDiskAlign) << name << ", turn " << turn;
      }
      EXPECT_TRUE(written == read) << name << ", turn " << turn;
    }
  };
  const std::jthread other([&] { moves("swap.1", 10); });
  moves("swap.0", 20);
}

INSTANTIATE_TEST_SUITE_P(Places, Queue, kPlaces, place_name);

/// From here on io_uring_setup fails in this process, as in many containers.
bool forbid_uring() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{.len = std::size(rules), .filter = rules};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(RefusedUring, FallsToThreadsAndSaysSoOnce) {
  const data::TemporaryFolder folder;
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (!forbid_uring()) ::_exit(2);
    std::string log;
    set_log_sink([&](LogLevel, const std::string& line) { log += line + "\n"; });
    DiskFile file(folder.path() / "swap.0", kDiskAlign, 0);
    const auto first = make_disk_queue(file, {.threads = 2}), second = make_disk_queue(file, {.threads = 2});
    log += std::string(first->name()) + " " + second->name();
    ::_exit(::write(ends[1], log.data(), log.size()) > 0 ? 0 : 3);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  ASSERT_EQ(WEXITSTATUS(status), 0);
  std::array<char, 4096> text{};
  const ssize_t bytes = ::read(ends[0], text.data(), text.size());
  const std::string log(text.data(), static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)));
  const auto line = log.find("tiers: no io_uring (");
  ASSERT_NE(line, std::string::npos) << log;
  EXPECT_NE(log.find("; swapping with 2 threads of pread and pwrite\nthreads threads", line), std::string::npos) << log;
  EXPECT_EQ(log.find("tiers: no io_uring (", line + 1), std::string::npos) << log;
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(DiskFile, IsReservedWholeAndDeleted) {
  const data::TemporaryFolder folder;
  const auto path = folder.path() / "swap.0";
  {
    DiskFile file(path, 3 * kDiskAlign, 0);
    EXPECT_EQ(std::filesystem::file_size(path), 3u * kDiskAlign);
    EXPECT_EQ(file.length_now(), 3 * kDiskAlign);
    std::filesystem::resize_file(path, 100);
    EXPECT_EQ(file.length_now(), 100);
    EXPECT_EQ(data::error_text<IoError>(folder, [&] { DiskFile(path, 1, 2); }),
              "[tiers.open] File exists (creating DIR/swap.0, rank 2; the folder must exist and be writable, the file "
              "must not exist)");
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(DiskFile, OnADiskThatIsTooSmallLeavesNothingBehind) {
  const data::TemporaryFolder folder;
  const auto path = folder.path() / "swap.0";
  const std::string error = data::error_text<IoError>(folder, [&] { DiskFile(path, std::int64_t{1} << 50, 3); });
  EXPECT_TRUE(error.starts_with("[tiers.reserve] ")) << error;  // full, or too large a file: the disk chooses
  EXPECT_NE(error.find("(DIR/swap.0 needs 1024 TiB, free are "), std::string::npos) << error;
  EXPECT_NE(error.find("rank 3; free space there or choose another nvme_path)"), std::string::npos) << error;
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace ballast::tiers
