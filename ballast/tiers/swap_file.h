#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {

/// One rank's preallocated file of one kind of state, made of numbered extents that are read and written whole. What is
/// read is what was last written, by length and checksum, or IoError.
///
/// A buffer is padded_bytes(extent) long and starts at a multiple of kDiskAlign; it is the file's from start_... until
/// finish() of that extent. Any number of extents may be under way; they are begun in the order of the calls and end in
/// any. Of each, block_size x queue_depth bytes are in flight; the rest is begun by later calls (pump() is one).
///
/// Errors: IoError ends the file. Nothing is in flight any more when it is thrown, and every later call throws it
/// again. UseError changes nothing. One thread at a time, and a thread that started something lives until that is
/// finished.
class SwapFile {
 public:
  /// Creates the file and reserves its space. extent_bytes: each >= 0 and padded to kDiskAlign. Throws IoError (also
  /// for a full disk) and leaves no file then.
  SwapFile(const std::filesystem::path& file, const std::vector<std::int64_t>& extent_bytes, const DiskOptions& options,
           int rank = 0);
  ~SwapFile();  // waits for what is in flight, deletes the file, never throws
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  int extents() const noexcept;
  std::int64_t padded_bytes(int extent) const;
  std::int64_t bytes() const noexcept;  // of the file

  /// Memory that buffers will lie in, pinned once for all where the system permits (io_uring, memlock limit); returns
  /// whether it is. With nothing in flight; the last call counts. The memory stays mapped for the file's life.
  bool register_buffers(const std::vector<std::span<std::byte>>& buffers);

  /// Waits for the extent's own write where one is under way. UseError for an extent that was never written, or whose
  /// last read isn't finished.
  void start_read(int extent, std::span<std::byte> to);
  void start_write(int extent, std::span<const std::byte> from);
  /// Waits until the extent's operation has ended and checks it; returns at once where there is none.
  void finish(int extent);
  void finish_all();
  /// Begins what now has room, never waits: keeps the disk busy during computations where extents are longer than what
  /// is in flight of them.
  void pump();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::tiers
