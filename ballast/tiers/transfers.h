#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "ballast/base/trace.h"
#include "ballast/tiers/disk_file.h"
#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {

/// Moves whole chunks through a queue: cuts them into requests, keeps the queue full, resumes what came back short or
/// interrupted. A chunk has either moved whole or an IoError names file, chunk, offset, bytes got and wanted, cause and
/// remedy; whatever throws, nothing is in flight afterwards, so the caller's memory is its own again.
class Transfers {
 public:
  /// options: block_size of a request, rounded up to kDiskAlign, and queue_depth requests of one chunk in flight. The
  /// queue holds those of kChunksAtOnce chunks, so that the disk has work while the driving thread has other work, or
  /// has to wait for a processor. The file outlives this object.
  Transfers(DiskFile& file, const DiskOptions& options);

  /// chunk: the caller's number for it, not in flight. data: aligned to kDiskAlign in address and length, untouched
  /// until wait(chunk) returns or something throws. Chunks are begun in the order of these calls.
  void start(int chunk, DiskOp op, std::int64_t offset, std::span<std::byte> data);
  /// Returns when the chunk has moved; at once where it isn't in flight.
  void wait(int chunk);
  /// Reaps what is ready and refills the queue; never waits.
  void pump();
  /// Waits until no request touches memory, whatever its fate, and forgets the rest.
  void drain() noexcept;

  DiskQueue& queue() noexcept { return *queue_; }

 private:
  struct Chunk {
    DiskOp op{};
    std::int64_t offset = 0;  // in the file
    std::span<std::byte> data;
    std::int64_t begun = 0;  // bytes given to pieces so far
    std::int64_t left = 0;   // bytes not moved yet
    int in_flight = 0;       // pieces
    trace::Mark started = trace::Mark::now();
  };
  struct Piece {
    int chunk = 0;
    std::int64_t at = 0, bytes = 0;  // what is left of it, relative to the chunk
    int fruitless = 0;               // tries that moved nothing
    bool direct = false;             // submitted with O_DIRECT
  };

  static constexpr int kChunksAtOnce = 8;

  void fill();
  bool reap(bool wait);
  void settle(const DiskCompletion& completion);
  void again(std::size_t slot);
  void free(std::size_t slot);
  DiskRequest request(std::size_t slot);
  void submit();
  [[noreturn]] void fail(const Piece& piece, const std::string& what, const char* remedy);

  DiskFile& file_;
  std::unique_ptr<DiskQueue> queue_;
  const std::int64_t block_;
  const int depth_;
  std::unordered_map<int, Chunk> chunks_;  // in flight
  std::deque<int> waiting_;                // chunks of which a part has no piece yet, oldest first
  std::vector<Piece> pieces_;  // one slot for each request that may be in flight; a request's tag is its slot
  std::vector<std::size_t> free_;
  std::vector<DiskRequest> batch_;
};

}  // namespace ballast::tiers
