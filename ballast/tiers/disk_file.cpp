#include "ballast/tiers/disk_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/base/log.h"

namespace ballast::tiers {
namespace {

std::string free_bytes_text(const std::filesystem::path& folder) {
  struct statvfs state {};
  if (::statvfs(folder.c_str(), &state) != 0) return "unknown";
  return format_bytes(static_cast<std::int64_t>(state.f_bavail) * static_cast<std::int64_t>(state.f_frsize));
}

}  // namespace

std::string errno_text(int error) { return std::generic_category().message(error); }

DiskFile::DiskFile(std::filesystem::path path, std::int64_t bytes, int rank)
    : path_(std::move(path)), bytes_(bytes), rank_(rank) {
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd_ < 0) {
    throw IoError("tiers.open", errno_text(errno), " (creating ", path_.string(), ", rank ", rank_,
                  "; the folder must exist and be writable, the file must not exist)");
  }
  try {
    reserve();
  } catch (...) {
    ::close(fd_);
    throw;
  }
  // Asked for behind the reservation: where a file system has no fallocate, the C library writes single bytes.
  const int flags = ::fcntl(fd_, F_GETFL);
  direct_ = flags >= 0 && ::fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0;
  if (!direct_) log_info("tiers: the file system of ", path_.string(), " refuses O_DIRECT; using the page cache");
}

void DiskFile::reserve() {
  if (bytes_ == 0) return;
  const std::string free_before = free_bytes_text(path_.parent_path());
  int error = 0;
  do error = ::posix_fallocate(fd_, 0, bytes_);
  while (error == EINTR);
  if (error == 0) return;
  // A failed reservation may leave the file grown and the disk full.
  if (::ftruncate(fd_, 0) != 0) log_warning("tiers: could not cut ", path_.string(), ": ", errno_text(errno));
  ::unlink(path_.c_str());
  throw IoError("tiers.reserve", errno_text(error), " (", path_.string(), " needs ", format_bytes(bytes_),
                ", free are ", free_before, ", rank ", rank_, "; free space there or choose another nvme_path)");
}

DiskFile::~DiskFile() {
  ::close(fd_);
  ::unlink(path_.c_str());
}

void DiskFile::drop_direct() {
  if (!direct_) return;
  direct_ = false;
  const int flags = ::fcntl(fd_, F_GETFL);
  if (flags >= 0) ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  log_info("tiers: the file system of ", path_.string(), " refuses transfers with O_DIRECT; using the page cache");
}

std::int64_t DiskFile::length_now() const noexcept {
  struct stat state {};
  return ::fstat(fd_, &state) == 0 ? static_cast<std::int64_t>(state.st_size) : -1;
}

}  // namespace ballast::tiers
