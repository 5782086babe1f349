#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "ballast/checkpoint/system.h"

namespace ballast::ckpt {

/// An open file whose whole blocks travel past the page cache (O_DIRECT) until the file system refuses that. Used by
/// several threads.
class Descriptor {
 public:
  /// flags: of open(2), without O_DIRECT. operation: of the errors. IoError.
  Descriptor(const char* operation, std::filesystem::path path, int flags, Owner owner);
  ~Descriptor();  // closes, never throws
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  const std::filesystem::path& path() const { return path_; }
  Owner owner() const { return owner_; }
  std::int64_t bytes() const;

  /// All of it. Offsets, lengths and addresses that are no multiples of kAlign go through the page cache.
  void write(std::span<const std::byte> data, std::int64_t offset);
  /// Less where the file ends; returns the bytes read.
  std::int64_t read(std::span<std::byte> to, std::int64_t offset);
  void reserve(std::int64_t bytes);
  void cut(std::int64_t bytes);
  void sync();
  /// Reports what only closing reports.
  void close();

  static constexpr std::int64_t kAlign = 4096;

 private:
  template <class Move>
  std::int64_t move(const void* memory, std::size_t bytes, std::int64_t offset, Move&& move);
  [[noreturn]] void fail(const char* operation, int error, const std::string& values) const;

  const std::filesystem::path path_;
  const Owner owner_;
  int fd_ = -1;      // through the page cache
  int direct_ = -1;  // the same file with O_DIRECT, or -1
  std::atomic<bool> use_direct_{false};
};

/// Memory for a block, aligned for O_DIRECT and in huge pages where the system has them: a disk takes a block of few
/// contiguous parts in one request.
struct FreeMemory {
  void operator()(std::byte* memory) const noexcept;
};
using BlockMemory = std::unique_ptr<std::byte[], FreeMemory>;
BlockMemory block_memory();

}  // namespace ballast::ckpt
