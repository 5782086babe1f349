#pragma once

#include <cstdint>
#include <vector>

namespace ballast::data {

/// Where a run stands in its data. Equal on all ranks, and independent of how many there are: a run may go on with
/// another number of ranks and sees every window of the epoch once all the same.
struct SamplerState {
  std::uint64_t seed = 0;
  std::int64_t windows = 0;  // of the training part
  std::int64_t drawn = 0;    // by all ranks since the start
};

/// Draws window indices in an order that the seed alone fixes: each epoch a new permutation, one epoch running into the
/// next, so that every window comes exactly once in each.
class Sampler {
 public:
  Sampler(std::int64_t windows, std::uint64_t seed) : state_{seed, windows, 0} {}

  /// The next `count` windows of this rank; the `world` ranks together take the next count * world of the order.
  /// All ranks call this the same number of times with the same count.
  std::vector<std::int64_t> next(std::int64_t count, int rank, int world);

  double epoch() const { return static_cast<double>(state_.drawn) / static_cast<double>(state_.windows); }
  SamplerState state() const noexcept { return state_; }
  /// Throws UseError where the state belongs to another seed or another number of windows.
  void restore(const SamplerState& state);

 private:
  SamplerState state_;
};

}  // namespace ballast::data
