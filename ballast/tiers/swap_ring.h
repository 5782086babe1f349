#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/tiers/device_stream.h"
#include "ballast/tiers/run_folder.h"
#include "ballast/tiers/swap_file.h"

namespace ballast::tiers {

/// Where a swap file lies, and how its extents travel to host memory and back.
struct SwapOptions {
  std::filesystem::path nvme_path;  // its folder's folder
  DiskOptions disk;
  int buffers = 4;         // extents in host memory at once, of those that there are: read ahead, open, being written;
                           // at least 2
  bool read_ahead = true;  // else expect() does nothing
  bool write_behind = true;  // else close() waits for the write
  bool pin_memory = false;   // of buffers, next to a device that copies from them
};

/// One rank's swap file of one kind of state, in a folder of its own, behind a ring of buffers in host memory. A buffer
/// is free, or holds an extent: one that was read ahead, that is open, that is being written, or that was closed and is
/// still as on disk. Driven by one thread.
class SwapRing {
 public:
  /// name: of the file. extent_bytes: each > 0. device: what buffers are copied to. Throws IoError, MemoryError.
  SwapRing(const std::string& name, const std::vector<std::int64_t>& extent_bytes, const SwapOptions& options,
           c10::Device device, int rank);

  /// Another file like that of `beside`, behind the same buffers, so that it takes no memory: `beside` may not be used
  /// again before this one is gone. Throws IoError.
  explicit SwapRing(SwapRing& beside);

  /// What a ring takes: the file, and its buffers in host memory.
  struct Bytes {
    std::int64_t file = 0, buffers = 0;
  };
  static Bytes bytes_of(const std::vector<std::int64_t>& extent_bytes, int buffers);
  const Bytes& bytes() const noexcept { return bytes_; }
  int extents() const noexcept { return static_cast<int>(extent_bytes_.size()); }

  /// The extent's bytes [extent_bytes], zeros before the first write; the caller's until close(). Waits for the disk.
  /// Others may be open, one buffer less than there are in all. Throws IoError.
  at::Tensor open(int extent);
  /// The same without reading: zeros, or undefined.
  at::Tensor open_zeros(int extent);
  at::Tensor open_new(int extent);
  /// changed: what was written to them counts. read_until: what reads the bytes on a device; they don't change before.
  void close(int extent, bool changed, DeviceEvent read_until = {});
  /// open(extent) will come soon: begins to read where a buffer is to be had that nobody else was promised.
  void expect(int extent);
  /// Waits for what is being read and written.
  void finish() { file_.finish_all(); }

 private:
  enum class State : std::uint8_t { kKept, kPromised, kOpen };
  struct Buffer {
    at::Tensor bytes;
    State state = State::kKept;
    int extent = -1;
    std::uint64_t used = 0;
    DeviceEvent read_until;
  };
  Buffer* find(int extent);
  Buffer& buffer_of(int extent, bool filled);
  Buffer* oldest(bool also_promised);
  void take(Buffer& buffer, int extent);
  void read(Buffer& buffer);
  at::Tensor hand_out(Buffer& buffer);
  std::span<std::byte> memory(const Buffer& buffer, int extent) const;
  void wait(int extent);
  void register_buffers();
  void forget_buffers();

  const std::string name_;
  const int rank_;
  const std::vector<std::int64_t> extent_bytes_;
  const SwapOptions options_;
  const Bytes bytes_;
  RunFolder folder_;
  std::vector<Buffer> buffers_;  // outlive file_'s transfers: file_ is declared after
  SwapFile file_;
  std::vector<bool> written_;  // by extent
  std::uint64_t clock_ = 0;
};

}  // namespace ballast::tiers
