#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/tiers/disk_queue.h"

namespace ballast {

/// Optimizer states that are not on the device, in chunks: the unit of work of an update and of disk I/O. A chunk is an
/// array of floats whose parts (master weights, moments) lie one after the other. Driven by one thread, the host
/// lane's.
class StateChunks {
 public:
  virtual ~StateChunks() = default;

  /// The chunk's floats, zeros at first; the caller's until close(). Waits for the disk where they are there. One at a
  /// time. Throws IoError.
  virtual float* open(int chunk) = 0;
  /// changed: what was written to them counts.
  virtual void close(int chunk, bool changed) = 0;
  /// open(chunk) will come soon: begins to read where that takes time.
  virtual void expect(int chunk) = 0;
  /// Waits for what is being written.
  virtual void finish() = 0;
};

/// sizes: floats by chunk.
std::unique_ptr<StateChunks> make_host_chunks(const std::vector<std::int64_t>& sizes,
                                              const std::shared_ptr<Ledger>& ledger);

/// How chunks travel to and from the disk.
struct ChunkRing {
  int buffers = 4;           // chunks in host memory at once: being read, open, being written; at least 2
  bool read_ahead = true;    // else expect() does nothing
  bool write_behind = true;  // else close() waits for the write
};

/// What chunks on disk take: the file, and the ring in host memory.
struct DiskChunkBytes {
  std::int64_t file = 0, ring = 0;
};
DiskChunkBytes disk_chunk_bytes(const std::vector<std::int64_t>& sizes, const ChunkRing& ring);

/// In one file, preallocated. Throws IoError.
std::unique_ptr<StateChunks> make_disk_chunks(const std::vector<std::int64_t>& sizes, const std::filesystem::path& file,
                                              const tiers::DiskOptions& disk, const ChunkRing& ring, int rank,
                                              const std::shared_ptr<Ledger>& ledger);

}  // namespace ballast
