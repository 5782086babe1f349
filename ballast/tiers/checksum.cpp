#include "ballast/tiers/checksum.h"

#define XXH_INLINE_ALL  // from the header alone: nothing to link, and vectorised with this file's flags
#include <xxhash.h>

namespace ballast::tiers {

std::uint64_t checksum(std::span<const std::byte> data) noexcept { return ::XXH3_64bits(data.data(), data.size()); }

}  // namespace ballast::tiers
