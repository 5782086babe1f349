#include "ballast/tiers/checksum.h"

#include <algorithm>

#define XXH_INLINE_ALL  // from the header alone: nothing to link, and vectorised with this file's flags
#include <xxhash.h>

namespace ballast::tiers {

std::uint64_t checksum(std::span<const std::byte> data, const std::function<void()>& between) {
  constexpr std::size_t kSlice = 512 << 10;
  ::XXH3_state_t state;
  ::XXH3_64bits_reset(&state);
  while (!data.empty()) {
    const auto slice = data.first(std::min(kSlice, data.size()));
    ::XXH3_64bits_update(&state, slice.data(), slice.size());
    data = data.subspan(slice.size());
    if (between) between();
  }
  return ::XXH3_64bits_digest(&state);
}

}  // namespace ballast::tiers
