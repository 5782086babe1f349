#pragma once

#include <cstdint>
#include <filesystem>

namespace ballast::cli {

struct BenchIoOptions {
  std::filesystem::path path;                 // a folder on the disk in question
  std::int64_t size = std::int64_t{1} << 30;  // bytes of the file that is read and written, 256 MiB at least
  double seconds = 0.5;                       // for each figure
  bool uring = true;                          // false: as where io_uring is refused
};

/// Prints the bandwidth of swap files below `path` by block size and queue depth, in the engine's own way of reading
/// and writing; the best setting as the block `aio` of a configuration; and how it compares with fio where that is
/// installed. Returns the exit status. Throws IoError.
int bench_io(const BenchIoOptions& options);

}  // namespace ballast::cli
