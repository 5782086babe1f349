#pragma once

#include <filesystem>

namespace ballast::tiers {

/// A folder below `nvme_path` for one rank of one run, `ballast-HOST-PID-rRANK-RANDOM`, whose marker file is locked for
/// as long as the object lives; the lock ends with the process, however that ends. Folders there whose run is dead
/// (made on this host, lock free) are removed first, with a line in the log. Ranks need no agreement about it.
class RunFolder {
 public:
  /// Throws IoError where nvme_path is missing, no folder, not writable, or on a file system without locks.
  RunFolder(const std::filesystem::path& nvme_path, int rank);
  ~RunFolder();  // removes the folder with all that is in it, never throws
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  int marker_ = -1;  // the locked file's descriptor
};

}  // namespace ballast::tiers
