#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ballast::tiers {

/// XXH3, 64 bits, seed 0: at the speed of memory, and any flipped bit changes it. Not for adversaries.
std::uint64_t checksum(std::span<const std::byte> data) noexcept;

}  // namespace ballast::tiers
