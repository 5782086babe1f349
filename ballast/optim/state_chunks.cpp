#include "ballast/optim/state_chunks.h"

#include <utility>

#include "ballast/tiers/host_arena.h"

namespace ballast {

StateChunks::StateChunks(const std::vector<std::int64_t>& sizes, const std::shared_ptr<Ledger>& ledger) {
  std::int64_t bytes = 0, planned = 0;
  for (std::int64_t size : sizes) {
    planned += tiers::HostArena::bytes_of(size, at::kFloat);
    bytes += size * 4;
  }
  tiers::HostArena arena(planned, false, c10::kCPU);  // nothing is copied from or to it
  for (std::int64_t size : sizes) on_host_.push_back(arena.allocate(size, at::kFloat));
  bytes_ = ledger->track(MemoryKind::kOptimizer, Tier::kHost, bytes);
}

StateChunks::StateChunks(const std::vector<std::int64_t>& sizes, const tiers::SwapOptions& swap, int rank,
                         const std::shared_ptr<Ledger>& ledger) {
  on_disk_.emplace("optimizer.swap", extents(sizes), swap, c10::kCPU, rank);
  staging_bytes_ =
      std::make_shared<Ledger::Entry>(ledger->track(MemoryKind::kStaging, Tier::kHost, on_disk_->bytes().buffers));
  bytes_ = ledger->track(MemoryKind::kOptimizer, Tier::kNvme, on_disk_->bytes().file);
}

StateChunks::StateChunks(StateChunks& beside, const std::shared_ptr<Ledger>& ledger)
    : staging_bytes_(beside.staging_bytes_) {
  on_disk_.emplace(*beside.on_disk_);
  bytes_ = ledger->track(MemoryKind::kOptimizer, Tier::kNvme, on_disk_->bytes().file);
}

std::vector<std::int64_t> StateChunks::extents(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> bytes;
  for (std::int64_t size : sizes) bytes.push_back(size * 4);
  return bytes;
}

float* StateChunks::open(int chunk, Access access) {
  const at::Tensor floats = !on_disk_                    ? on_host_[static_cast<std::size_t>(chunk)]
                            : access == Access::kReplace ? on_disk_->open_new(chunk)
                                                         : on_disk_->open(chunk);
  return static_cast<float*>(floats.mutable_data_ptr());
}

void StateChunks::close(int chunk, Access access) {
  if (on_disk_) on_disk_->close(chunk, access != Access::kRead);
}

void StateChunks::finish() {
  if (on_disk_) on_disk_->finish();
}

void StateChunks::replace(int chunk, at::Tensor floats) {
  on_host_.at(static_cast<std::size_t>(chunk)) = std::move(floats);
}

void StateChunks::expect(int chunk) {
  if (on_disk_) on_disk_->expect(chunk);
}

}  // namespace ballast
