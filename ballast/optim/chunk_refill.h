#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "ballast/optim/state_chunks.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

/// New values for all chunks that lie on disk, in a second file: they need memory for the ring's few buffers only, and
/// travel to the disk while the next ones come. The chunks in use stay as they are until the two are exchanged.
///
/// Threads: the caller's fills what the lane's thread has opened; that thread does all the rest, the end of the file
/// that nobody uses any more included, for which nobody waits. A failure of the second file is an error of run(), and
/// none of the lane's.
class ChunkRefill {
 public:
  /// chunks: made on the lane's thread, not used yet. count: how many there are. together: how many of them are filled
  /// at a time, no more than their ring has buffers; behind the others it writes meanwhile.
  ChunkRefill(std::unique_ptr<StateChunks> chunks, int count, int together, tiers::HostLane& lane)
      : chunks_(std::move(chunks)), count_(count), together_(together), lane_(lane) {}
  ~ChunkRefill();
  ChunkRefill(const ChunkRefill&) = delete;
  ChunkRefill& operator=(const ChunkRefill&) = delete;

  /// begin(chunk, floats) for each, in order: where its floats are to be written, every one. complete() behind those of
  /// a few chunks: when it returns, they are. When run() returns the disk has them all. Throws what these throw, and
  /// IoError.
  void run(const std::function<void(int chunk, float* floats)>& begin, const std::function<void()>& complete);
  /// On the lane's thread, after run().
  void exchange(std::unique_ptr<StateChunks>& in_use) { chunks_.swap(in_use); }

 private:
  tiers::HostLane::Ticket submit(const std::function<void()>& job);
  void wait(tiers::HostLane::Ticket ticket);

  std::unique_ptr<StateChunks> chunks_;  // the lane's
  const int count_, together_;
  tiers::HostLane& lane_;
  std::exception_ptr error_;  // written by the lane's thread; the caller's reads it behind a wait for that
};

}  // namespace ballast
