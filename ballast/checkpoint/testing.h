#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

namespace ballast::testing {

/// What checkpoints ask of the file system.
enum class FileOp : std::uint8_t { kOpen, kReserve, kRead, kWrite, kSync, kRename, kMakeFolder, kRemove };

/// What becomes of one such call.
struct FileFault {
  int error = 0;           // errno with which it fails, having done nothing
  std::int64_t most = -1;  // bytes that a read or write moves at most
};
using FilePlan = std::function<FileFault(FileOp op, const std::filesystem::path& path)>;

/// While it lives, every such call of this process, from whichever thread, is first put to `plan`, one at a time.
class FileFaults {
 public:
  explicit FileFaults(FilePlan plan);
  ~FileFaults();
  FileFaults(const FileFaults&) = delete;
  FileFaults& operator=(const FileFaults&) = delete;
};

}  // namespace ballast::testing
