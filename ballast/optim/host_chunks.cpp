#include <numeric>

#include "ballast/optim/state_chunks.h"
#include "ballast/tiers/host_arena.h"

namespace ballast {
namespace {

class HostChunks final : public StateChunks {
 public:
  HostChunks(const std::vector<std::int64_t>& sizes, const std::shared_ptr<Ledger>& ledger) {
    std::int64_t bytes = 0, planned = 0;
    for (std::int64_t size : sizes) {
      planned += tiers::HostArena::bytes_of(size, at::kFloat);
      bytes += size * 4;
    }
    tiers::HostArena arena(planned, false, c10::kCPU);  // nothing is copied from or to it
    for (std::int64_t size : sizes) chunks_.push_back(arena.allocate(size, at::kFloat));
    bytes_ = ledger->track(MemoryKind::kOptimizer, Tier::kHost, bytes);
  }

  float* open(int chunk) override { return chunks_[static_cast<std::size_t>(chunk)].mutable_data_ptr<float>(); }
  void close(int, bool) override {}
  void expect(int) override {}
  void finish() override {}

 private:
  std::vector<at::Tensor> chunks_;
  Ledger::Entry bytes_;
};

}  // namespace

std::unique_ptr<StateChunks> make_host_chunks(const std::vector<std::int64_t>& sizes,
                                              const std::shared_ptr<Ledger>& ledger) {
  return std::make_unique<HostChunks>(sizes, ledger);
}

}  // namespace ballast
