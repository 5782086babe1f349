#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace ballast::tiers {

/// Offsets, lengths and addresses of what goes to disk are multiples of this: the largest sector and the page.
inline constexpr std::int64_t kDiskAlign = 4096;

/// A new file with its space reserved, read and written past the page cache (O_DIRECT) where its file system accepts
/// that. Deleted with the object.
class DiskFile {
 public:
  /// Throws IoError where the file exists or can't be made; where the disk is full, with the bytes needed and free, and
  /// nothing is left behind. rank: for error texts.
  DiskFile(std::filesystem::path path, std::int64_t bytes, int rank);
  ~DiskFile();  // closes and unlinks, never throws
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  std::int64_t bytes() const noexcept { return bytes_; }
  int rank() const noexcept { return rank_; }
  int fd() const noexcept { return fd_; }

  bool direct() const noexcept { return direct_; }
  /// From now on through the page cache: some file systems take O_DIRECT at open and refuse the first transfer. Logged.
  void drop_direct();

  /// Its length as the file system has it now; less than bytes() where somebody has cut it. -1 where it can't tell.
  std::int64_t length_now() const noexcept;

 private:
  void reserve();

  const std::filesystem::path path_;
  const std::int64_t bytes_;
  const int rank_;
  int fd_ = -1;
  bool direct_ = false;
};

/// "Input/output error", of an errno.
std::string errno_text(int error);

}  // namespace ballast::tiers
