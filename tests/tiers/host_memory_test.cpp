// Limits from trees of files that look like those of the kernel.
#include "ballast/tiers/host_memory.h"

#include "tests/data/temporary_folder.h"

namespace ballast::tiers {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

class Machine : public testing::Test {
 protected:
  Machine() { root_.write("proc/meminfo", "MemTotal: 102400 kB\nMemFree: 1024 kB\nMemAvailable: 51200 kB\n"); }
  void group(const std::string& folder, const std::string& limit, const std::string& usage, const std::string& stat) {
    const bool v1 = folder.find("/memory") != std::string::npos;
    root_.write(folder + (v1 ? "/memory.limit_in_bytes" : "/memory.max"), limit);
    root_.write(folder + (v1 ? "/memory.usage_in_bytes" : "/memory.current"), usage);
    root_.write(folder + "/memory.stat", stat);
  }
  std::int64_t available() { return available_host_bytes(root_.path()); }
  data::TemporaryFolder root_;
};

TEST_F(Machine, WithoutGroupsHasItsAvailableMemory) { EXPECT_EQ(available(), 50 * kMiB); }

TEST_F(Machine, TheLeastLimitOnTheWayUpCounts) {
  root_.write("proc/self/cgroup", "0::/jobs/one\n");
  group("sys/fs/cgroup/jobs", std::to_string(40 * kMiB), std::to_string(30 * kMiB),
        "anon 5\ninactive_file " + std::to_string(10 * kMiB) + "\nactive_file " + std::to_string(2 * kMiB) + "\n");
  group("sys/fs/cgroup/jobs/one", "max\n", std::to_string(20 * kMiB), "inactive_file 0\n");
  EXPECT_EQ(available(), 22 * kMiB) << "40 less 30, of which 12 are page cache";
  group("sys/fs/cgroup/jobs/one", std::to_string(21 * kMiB), std::to_string(20 * kMiB), "");
  EXPECT_EQ(available(), kMiB);
  group("sys/fs/cgroup/jobs/one", std::to_string(10 * kMiB), std::to_string(20 * kMiB), "");
  EXPECT_EQ(available(), 0);
}

TEST_F(Machine, AContainersRootHoldsItsOwnGroup) {
  root_.write("proc/self/cgroup", "0::/../../pods/x\n");
  group("sys/fs/cgroup", std::to_string(9 * kMiB), std::to_string(kMiB), "");
  EXPECT_EQ(available(), 8 * kMiB);
}

TEST_F(Machine, TheOldVersionsLimitCounts) {
  root_.write("proc/self/cgroup", "12:pids:/a\n7:cpu,memory:/a/b\n1:name=systemd:/\n");
  group("sys/fs/cgroup/memory", "9223372036854771712", std::to_string(kMiB), "");
  group("sys/fs/cgroup/memory/a", std::to_string(8 * kMiB), std::to_string(6 * kMiB),
        "inactive_file 1\ntotal_inactive_file " + std::to_string(3 * kMiB) + "\n");
  EXPECT_EQ(available(), 5 * kMiB);
}

TEST(HostMemory, OfThisMachineIsPositive) {
  EXPECT_GT(available_host_bytes(), 0);
  EXPECT_LT(available_host_bytes(), std::int64_t{1} << 50);
}

TEST(HostMemory, APlanThatDoesNotFitSaysByKindWhatItNeeds) {
  const data::TemporaryFolder none;
  const std::vector<MemoryNeed> needs{{"optimizer states", 3 * kMiB}, {"gradients", kMiB}};
  require_host_memory(needs, 4 * kMiB, "");
  EXPECT_EQ(data::error_text<MemoryError>(none, [&] { require_host_memory(needs, 4 * kMiB - 1, "use nvme"); }),
            "[tiers.host_memory] the plan doesn't fit into host memory (needed 4.00 MiB: optimizer states 3.00 MiB, "
            "gradients 1.00 MiB; available 4.00 MiB; use nvme)");
}

}  // namespace
}  // namespace ballast::tiers
