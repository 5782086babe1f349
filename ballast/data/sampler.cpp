#include "ballast/data/sampler.h"

#include "ballast/base/error.h"
#include "ballast/data/permutation.h"

namespace ballast::data {

std::vector<std::int64_t> Sampler::next(std::int64_t count, int rank, int world) {
  std::vector<std::int64_t> indices;
  indices.reserve(static_cast<std::size_t>(count));
  const std::int64_t first = state_.drawn + rank * count;
  for (std::int64_t place = first; place < first + count; ++place) {
    const auto epoch = static_cast<std::uint64_t>(place / state_.windows);
    indices.push_back(Permutation(state_.windows, mix(mix(state_.seed) + epoch))(place % state_.windows));
  }
  state_.drawn += count * world;
  return indices;
}

void Sampler::restore(const SamplerState& state) {
  if (state.seed != state_.seed || state.windows != state_.windows || state.drawn < 0)
    throw UseError("data.restore", "the position belongs to other data (got seed ", state.seed, ", ", state.windows,
                   " windows, ", state.drawn, " drawn; want seed ", state_.seed, ", ", state_.windows, " windows)");
  state_ = state;
}

}  // namespace ballast::data
