#include "ballast/tiers/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"

namespace ballast::tiers {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

/// The number behind `name` in a file of lines "name number"; with an empty name the file's only number.
std::optional<std::int64_t> number_in(const fs::path& file, const std::string& name = "") {
  std::ifstream in(file);
  std::string word;
  std::int64_t number = 0;
  if (name.empty()) return in >> number ? std::optional(number) : std::nullopt;  // "max" is no number: no limit
  while (in >> word) {
    if (word != name) continue;
    return in >> number ? std::optional(number) : std::nullopt;
  }
  return std::nullopt;
}

/// Where the two versions of control groups keep the same facts.
struct Version {
  const char *mount, *limit, *usage, *inactive, *active;
};
constexpr Version kV2{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};
constexpr Version kV1{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                      "total_active_file"};

std::int64_t left_in(const fs::path& group, const Version& version) {
  const auto limit = number_in(group / version.limit), usage = number_in(group / version.usage);
  if (!limit || !usage) return kUnlimited;
  const std::int64_t cache = number_in(group / "memory.stat", version.inactive).value_or(0) +
                             number_in(group / "memory.stat", version.active).value_or(0);
  return std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, *usage - cache));
}

/// path: the group's own, as /proc/self/cgroup has it. In a container it may be one that is visible only outside: then
/// the mount's root is the group.
std::int64_t left_on_the_way_up(const fs::path& root, const std::string& path, const Version& version) {
  const fs::path top = root / version.mount;
  std::int64_t left = left_in(top, version);
  fs::path group = top;
  for (const fs::path& name : fs::path(path).relative_path()) {
    if (name == "..") return left;
    group /= name;
    left = std::min(left, left_in(group, version));
  }
  return left;
}

}  // namespace

std::int64_t available_host_bytes(const fs::path& root) {
  const auto kibibytes = number_in(root / "proc/meminfo", "MemAvailable:");
  std::int64_t available = kibibytes ? *kibibytes * 1024 : kUnlimited;
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/path" in version 2, "7:memory:/path" in version 1.
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") available = std::min(available, left_on_the_way_up(root, path, kV2));
    if (controllers.find(",memory,") != std::string::npos)
      available = std::min(available, left_on_the_way_up(root, path, kV1));
  }
  return available;
}

void require_host_memory(const std::vector<MemoryNeed>& needs, std::int64_t available, const std::string& remedy) {
  std::int64_t needed = 0;
  std::ostringstream kinds;
  for (const MemoryNeed& need : needs) {
    needed += need.bytes;
    kinds << (&need == needs.data() ? "" : ", ") << need.what << ' ' << format_bytes(need.bytes);
  }
  if (needed <= available) return;
  throw MemoryError("tiers.host_memory", "the plan doesn't fit into host memory (needed ", format_bytes(needed), ": ",
                    kinds.str(), "; available ", format_bytes(available), "; ", remedy, ")");
}

}  // namespace ballast::tiers
