#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "ballast/config/config.h"
#include "ballast/tiers/disk_file.h"

namespace ballast::tiers {

enum class DiskOp : std::uint8_t { kRead, kWrite };

/// One contiguous transfer between memory and a file. data is only read where op is kWrite.
struct DiskRequest {
  DiskOp op{};
  std::int64_t offset = 0;  // bytes from the file's start
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  std::uint64_t tag = 0;  // comes back with the completion
};

struct DiskCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  // bytes moved, possibly fewer than asked for, or -errno
};

/// How a file is read and written.
struct DiskOptions {
  std::int64_t block_size = 1 << 20;  // bytes a request at most
  int queue_depth = 8;                // requests in flight at most
  int threads = 4;                    // of the queue without io_uring
  bool uring = true;                  // false: threads, also where io_uring is permitted
};

/// As the block `aio` of a configuration says.
DiskOptions disk_options(const AioConfig& config);

/// Requests in flight on one file. It moves bytes and judges nothing: short transfers and errors are the caller's. One
/// thread at a time; a thread that submits lives until its requests are reaped (the kernel cancels those of a dead
/// one).
class DiskQueue {
 public:
  /// Returns when no request touches memory any more.
  virtual ~DiskQueue() = default;

  virtual const char* name() const noexcept = 0;
  virtual int depth() const noexcept = 0;
  virtual int in_flight() const noexcept = 0;

  /// Starts the requests: no more than depth() - in_flight(). Throws IoError where the system refuses to take them.
  virtual void submit(std::span<const DiskRequest> requests) = 0;

  /// One completion, in whatever order the disk finishes. Nothing where none is ready and `wait` is false, or where
  /// nothing is in flight.
  virtual std::optional<DiskCompletion> reap(bool wait) = 0;

  /// Pins memory that requests will use once for all, where the system permits; called with nothing in flight, the last
  /// call counts. Returns whether it did. Without it every request pins its own pages: the same result, more time.
  virtual bool register_buffers(std::span<const std::span<std::byte>> buffers) { return false; }
};

/// io_uring where the build has it and the system permits it, else threads with pread and pwrite; the first time that
/// falls to threads the reason goes to the log. The file outlives the queue.
std::unique_ptr<DiskQueue> make_disk_queue(const DiskFile& file, const DiskOptions& options);

/// The two kinds by name. make_uring_queue() returns null where io_uring is refused and puts the reason into why_not.
std::unique_ptr<DiskQueue> make_uring_queue(const DiskFile& file, int depth, std::string& why_not);
std::unique_ptr<DiskQueue> make_thread_queue(const DiskFile& file, int depth, int threads);

}  // namespace ballast::tiers
