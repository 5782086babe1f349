#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace ballast::tiers {

/// XXH3, 64 bits, seed 0: at the speed of memory, and any flipped bit changes it. Not for adversaries. between: called
/// every half MiB, so that a long one doesn't leave a disk without work.
std::uint64_t checksum(std::span<const std::byte> data, const std::function<void()>& between = {});

}  // namespace ballast::tiers
