#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ballast::tiers {

/// Bytes of host memory that this process may still take without swapping or being killed: the least of the machine's
/// MemAvailable and, on the way from the process's control group up to the root (v2 and v1), limit - usage, where the
/// page cache, which the kernel gives up first, doesn't count as usage. root: where /proc and /sys are found.
std::int64_t available_host_bytes(const std::filesystem::path& root = "/");

struct MemoryNeed {
  std::string what;  // "optimizer states"
  std::int64_t bytes = 0;
};

/// Throws MemoryError where the sum of needs is more than available, with every need and both sums. remedy: ends the
/// text.
void require_host_memory(const std::vector<MemoryNeed>& needs, std::int64_t available, const std::string& remedy);

}  // namespace ballast::tiers
