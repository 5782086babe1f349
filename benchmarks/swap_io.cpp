// The swap file against the bare queue on the same disk: what cutting into requests, resuming and checksums cost. Each
// pass reads or writes every chunk once, two under way, as an update does.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ballast/base/checksum.h"
#include "ballast/base/math.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/run_folder.h"
#include "ballast/tiers/swap_file.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;
using tiers::DiskOp;
using tiers::DiskOptions;

constexpr int kTurns = 7;

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.nbytes())};
}

/// All of the file once, block by block.
void bare_pass(const tiers::DiskFile& file, tiers::DiskQueue& queue, const DiskOptions& options, DiskOp op,
               std::span<std::byte> buffer) {
  std::int64_t begun = 0;
  const auto begin = [&](std::uint64_t slot) {
    if (begun >= file.bytes()) return;
    const std::int64_t bytes = std::min(options.block_size, file.bytes() - begun);
    const tiers::DiskRequest request{.op = op,
                                     .offset = begun,
                                     .data = buffer.data() + static_cast<std::int64_t>(slot) * options.block_size,
                                     .bytes = bytes,
                                     .tag = slot};
    queue.submit({&request, 1});
    begun += bytes;
  };
  for (int slot = 0; slot < options.queue_depth; ++slot) begin(static_cast<std::uint64_t>(slot));
  while (const auto completion = queue.reap(true)) begin(completion->tag);
}

void swap_pass(tiers::SwapFile& file, DiskOp op, const std::vector<std::span<std::byte>>& ring) {
  const int chunks = file.extents(), ahead = static_cast<int>(ring.size()) - 1;
  const auto start = [&](int chunk) {
    const std::span<std::byte> buffer = ring[static_cast<std::size_t>(chunk) % ring.size()];
    if (op == DiskOp::kRead) file.start_read(chunk, buffer);
    if (op == DiskOp::kWrite) file.start_write(chunk, buffer);
  };
  for (int chunk = 0; chunk < std::min(ahead, chunks); ++chunk) start(chunk);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + ahead < chunks) start(chunk + ahead);
    file.finish(chunk);
  }
}

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "A swap file against the bare queue, in the same run.");
  const std::string path = flags.text("path", std::filesystem::temp_directory_path().string(), "folder on the disk");
  const std::int64_t chunk = flags.number("chunk", 8 << 20, "bytes of a chunk");
  const auto chunks = static_cast<int>(flags.number("chunks", 64, "of the file"));
  const auto ring = static_cast<int>(flags.number("ring", 3, "chunks in memory"));
  DiskOptions options;
  options.block_size = flags.number("block", options.block_size, "bytes of a request");
  options.queue_depth = static_cast<int>(flags.number("depth", options.queue_depth, "requests in flight"));
  options.uring = flags.number("uring", 1, "0: threads") != 0;
  flags.finish();

  const tiers::RunFolder folder(path, 0);
  const std::int64_t padded = round_up(chunk, tiers::kDiskAlign);
  tiers::DiskFile bare(folder.path() / "bare", padded * chunks, 0);
  const auto queue = tiers::make_disk_queue(bare, options);
  tiers::SwapFile swap(folder.path() / "swap", std::vector<std::int64_t>(static_cast<std::size_t>(chunks), chunk),
                       options);
  const std::int64_t flat = options.block_size * options.queue_depth;
  tiers::HostArena arena(padded * ring + round_up(flat, tiers::kDiskAlign), false, c10::kCPU);
  std::vector<std::span<std::byte>> buffers;
  for (int i = 0; i < ring; ++i) buffers.push_back(bytes_of(arena.allocate(padded, at::kByte)));
  const std::span<std::byte> buffer = bytes_of(arena.allocate(flat, at::kByte));
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  for (const auto& part : buffers)
    for (std::size_t i = 0; i < part.size(); ++i) part[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  queue->register_buffers({&buffer, 1});
  swap.register_buffers(buffers);

  const double gigabytes = static_cast<double>(padded * chunks) / 1e9;
  std::printf("%s, %d chunks of %lld bytes, requests of %lld bytes, %d in flight; medians of %d turns\n", queue->name(),
              chunks, static_cast<long long>(chunk), static_cast<long long>(options.block_size), options.queue_depth,
              kTurns);
  for (const DiskOp op : {DiskOp::kWrite, DiskOp::kRead}) {
    const auto bare_turn = [&] { bare_pass(bare, *queue, options, op, buffer); };
    const auto swap_turn = [&] { swap_pass(swap, op, buffers); };
    if (op == DiskOp::kWrite) bare_turn(), swap_turn();  // space that is only reserved is written more slowly
    const bench::Turns turns = bench::take_turns(kTurns, bare_turn, swap_turn);
    std::printf("%-5s  queue %.2f GB/s, swap file %.2f GB/s: %.2fx\n", op == DiskOp::kRead ? "read" : "write",
                gigabytes / turns.base.seconds, gigabytes / turns.other.seconds, turns.speed.seconds);
  }
  std::uint64_t sum = 0;
  const bench::Cost cost = bench::cost_of([&] {
    for (int i = 0; i < chunks; ++i) sum += checksum(buffers[static_cast<std::size_t>(i % ring)]);
  });
  std::printf("checksum %.1f GB/s of one thread (%016llx)\n", gigabytes / cost.seconds,
              static_cast<unsigned long long>(sum));
}
