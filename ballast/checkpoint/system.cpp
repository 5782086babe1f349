#include "ballast/checkpoint/system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <mutex>
#include <system_error>

namespace ballast {
namespace testing {
namespace {

std::mutex plan_mutex;
FilePlan plan;
std::atomic<bool> planned{false};  // spares the lock where no test is

FileFault fault_of(FileOp op, const std::filesystem::path& path) {
  if (!planned.load(std::memory_order_acquire)) return {};  // pairs with the store behind the plan
  const std::lock_guard lock(plan_mutex);
  return plan ? plan(op, path) : FileFault{};
}

}  // namespace

FileFaults::FileFaults(FilePlan wanted) {
  const std::lock_guard lock(plan_mutex);
  plan = std::move(wanted);
  planned.store(true, std::memory_order_release);
}
FileFaults::~FileFaults() {
  const std::lock_guard lock(plan_mutex);
  planned.store(false, std::memory_order_release);
  plan = nullptr;
}

}  // namespace testing

namespace ckpt {
namespace sys {
namespace {

bool refused(FileOp op, const std::filesystem::path& path) {
  testing::FileFault fault = testing::fault_of(op, path);
  while (fault.error == EINTR) fault = testing::fault_of(op, path);  // as resumed() does with the system's
  if (fault.error != 0) errno = fault.error;
  return fault.error != 0;
}

template <class Call>
auto resumed(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// transfer(offset into the data, bytes): as pread and pwrite.
template <class Transfer>
std::int64_t move_all(FileOp op, const std::filesystem::path& path, std::size_t bytes, Transfer&& transfer) {
  std::size_t done = 0;
  while (done < bytes) {
    const testing::FileFault fault = testing::fault_of(op, path);
    if (fault.error == EINTR) continue;
    if (fault.error != 0) {
      errno = fault.error;
      return -1;
    }
    std::size_t part = bytes - done;
    if (fault.most >= 0) part = std::min(part, static_cast<std::size_t>(fault.most));
    const auto moved = part == 0 ? 0 : resumed([&] { return transfer(done, part); });
    if (moved < 0) return -1;
    if (moved == 0) break;
    done += static_cast<std::size_t>(moved);
  }
  return static_cast<std::int64_t>(done);
}

}  // namespace

int open(const std::filesystem::path& path, int flags) {
  if (refused(FileOp::kOpen, path)) return -1;
  return resumed([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); });
}

std::int64_t read(int fd, const std::filesystem::path& path, std::span<std::byte> to, std::int64_t offset) {
  return move_all(FileOp::kRead, path, to.size(), [&](std::size_t done, std::size_t part) {
    return ::pread(fd, to.data() + done, part, offset + static_cast<std::int64_t>(done));
  });
}

std::int64_t write(int fd, const std::filesystem::path& path, std::span<const std::byte> data, std::int64_t offset) {
  return move_all(FileOp::kWrite, path, data.size(), [&](std::size_t done, std::size_t part) {
    return ::pwrite(fd, data.data() + done, part, offset + static_cast<std::int64_t>(done));
  });
}

int reserve(int fd, const std::filesystem::path& path, std::int64_t bytes) {
  if (refused(FileOp::kReserve, path)) return -1;
  const int result = resumed([&] { return ::fallocate(fd, 0, 0, bytes); });
  return result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS) ? 0 : result;
}

int sync(int fd, const std::filesystem::path& path) {
  if (refused(FileOp::kSync, path)) return -1;
  return resumed([&] { return ::fsync(fd); });
}

int rename(const std::filesystem::path& from, const std::filesystem::path& to, bool exchange) {
  if (refused(FileOp::kRename, to)) return -1;
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), exchange ? RENAME_EXCHANGE : 0);
}

int make_folder(const std::filesystem::path& path) {
  if (refused(FileOp::kMakeFolder, path)) return -1;
  return ::mkdir(path.c_str(), 0755);
}

int remove(const std::filesystem::path& path) {
  if (refused(FileOp::kRemove, path)) return -1;
  return ::remove(path.c_str());
}

}  // namespace sys

std::string rank_text(Owner owner) { return owner.rank < 0 ? "" : "; rank " + std::to_string(owner.rank); }

IoError io_error(const char* operation, int error, const std::filesystem::path& path, const std::string& values,
                 Owner owner) {
  const char* remedy = "look for disk errors in the kernel's log, or use another folder";
  if (error == ENOSPC || error == EDQUOT) remedy = "free space there, or save into another folder";
  if (error == EACCES || error == EPERM || error == EROFS)
    remedy = "the path must be readable, and to save also writable, for this user";
  if (error == ENOENT || error == ENOTDIR) remedy = "check the path";
  return IoError(operation, std::generic_category().message(error), " (", path.string(), values.empty() ? "" : "; ",
                 values, rank_text(owner), "; ", remedy, ")");
}

}  // namespace ckpt
}  // namespace ballast
