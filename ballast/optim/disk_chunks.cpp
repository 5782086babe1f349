#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "ballast/base/math.h"
#include "ballast/base/trace.h"
#include "ballast/optim/state_chunks.h"
#include "ballast/tiers/disk_file.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/swap_file.h"

namespace ballast {
namespace {

/// A ring of chunk buffers over a swap file. A buffer is free, holds a chunk that was read ahead, the one that is open,
/// or one that is being written; it is taken for another chunk in the order in which it was used last.
class DiskChunks final : public StateChunks {
 public:
  DiskChunks(const std::vector<std::int64_t>& sizes, const std::filesystem::path& file, const tiers::DiskOptions& disk,
             const ChunkRing& ring, int rank, const std::shared_ptr<Ledger>& ledger)
      : ring_(ring), file_(file, bytes_of(sizes), disk, rank), written_(sizes.size(), false) {
    const DiskChunkBytes bytes = disk_chunk_bytes(sizes, ring);
    const std::int64_t longest = bytes.ring / ring.buffers;
    tiers::HostArena arena(ring.buffers * tiers::HostArena::bytes_of(longest, at::kByte), false, c10::kCPU);
    std::vector<std::span<std::byte>> spans;
    for (int b = 0; b < ring.buffers; ++b) {
      buffers_.push_back({arena.allocate(longest, at::kByte)});
      spans.push_back(memory(buffers_.back(), longest));
    }
    file_.register_buffers(spans);
    staging_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, bytes.ring);
    disk_bytes_ = ledger->track(MemoryKind::kOptimizer, Tier::kNvme, file_.bytes());
  }

  float* open(int chunk) override {
    Buffer& buffer = take(chunk);
    wait(chunk);  // for its read; or its write, which has the same bytes
    buffer.state = State::kOpen;
    return reinterpret_cast<float*>(memory(buffer, file_.padded_bytes(chunk)).data());
  }

  void close(int chunk, bool changed) override {
    Buffer& buffer = *find(chunk);
    buffer.state = State::kAhead;  // what it holds may be opened again
    if (!changed) return;
    file_.start_write(chunk, memory(buffer, file_.padded_bytes(chunk)));
    written_[static_cast<std::size_t>(chunk)] = true;
    buffer.state = State::kWriting;
    if (!ring_.write_behind) wait(chunk);
  }

  void expect(int chunk) override {
    if (ring_.read_ahead) take(chunk);
    file_.pump();
  }

  void finish() override { file_.finish_all(); }

 private:
  enum class State : std::uint8_t { kFree, kAhead, kOpen, kWriting };
  struct Buffer {
    at::Tensor bytes;
    State state = State::kFree;
    int chunk = -1;
    std::uint64_t used = 0;
  };

  static std::vector<std::int64_t> bytes_of(const std::vector<std::int64_t>& sizes) {
    std::vector<std::int64_t> bytes;
    for (std::int64_t size : sizes) bytes.push_back(size * 4);
    return bytes;
  }
  static std::span<std::byte> memory(const Buffer& buffer, std::int64_t bytes) {
    return {static_cast<std::byte*>(buffer.bytes.mutable_data_ptr()), static_cast<std::size_t>(bytes)};
  }
  void wait(int chunk) {
    const std::string name = trace::on() ? std::to_string(chunk) : std::string();
    const trace::Span span(trace::Lane::kHostWaits, "chunk", name);
    file_.finish(chunk);
  }
  Buffer* find(int chunk) {
    const auto found =
        std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.chunk == chunk; });
    return found == buffers_.end() ? nullptr : &*found;
  }

  // The buffer that holds the chunk or will, its read begun.
  Buffer& take(int chunk) {
    Buffer* buffer = find(chunk);
    if (buffer == nullptr) {
      for (Buffer& b : buffers_)
        if (b.state != State::kOpen && (buffer == nullptr || b.used < buffer->used)) buffer = &b;
      if (buffer->chunk >= 0) wait(buffer->chunk);
      buffer->chunk = chunk;
      buffer->state = State::kAhead;
      const std::span<std::byte> to = memory(*buffer, file_.padded_bytes(chunk));
      if (written_[static_cast<std::size_t>(chunk)]) {
        file_.start_read(chunk, to);
      } else {
        std::memset(to.data(), 0, to.size());
      }
    }
    buffer->used = ++clock_;
    return *buffer;
  }

  const ChunkRing ring_;
  std::vector<Buffer> buffers_;  // outlives file_'s transfers: file_ is declared after
  tiers::SwapFile file_;
  std::vector<bool> written_;
  std::uint64_t clock_ = 0;
  Ledger::Entry staging_bytes_, disk_bytes_;
};

}  // namespace

DiskChunkBytes disk_chunk_bytes(const std::vector<std::int64_t>& sizes, const ChunkRing& ring) {
  DiskChunkBytes bytes;
  std::int64_t longest = 0;
  for (const std::int64_t size : sizes) {
    const std::int64_t extent = round_up(size * 4, tiers::kDiskAlign);
    bytes.file += extent;
    longest = std::max(longest, extent);
  }
  bytes.ring = ring.buffers * longest;
  return bytes;
}

std::unique_ptr<StateChunks> make_disk_chunks(const std::vector<std::int64_t>& sizes, const std::filesystem::path& file,
                                              const tiers::DiskOptions& disk, const ChunkRing& ring, int rank,
                                              const std::shared_ptr<Ledger>& ledger) {
  return std::make_unique<DiskChunks>(sizes, file, disk, ring, rank, ledger);
}

}  // namespace ballast
