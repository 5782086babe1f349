#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/layout/layout.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/host_lane.h"
#include "ballast/tiers/swap_ring.h"

namespace ballast {

/// Where the shards of sharded units rest.
struct ShardPolicy {
  Tier tier = Tier::kDevice;
  bool pin_memory = false;   // of host memory, next to a device
  std::int64_t in_host = 0;  // kNvme: elements of a rank that stay in host memory, the first units'
  /// kNvme: elements of a ring's buffer at most.
  std::int64_t longest = std::numeric_limits<std::int64_t>::max();
  tiers::SwapOptions swap{};  // kNvme
};

/// Each unit's tier. ConfigError where a shard is longer than a buffer may be.
std::vector<Tier> place_shards(const Layout& layout, const ShardPolicy& policy);

/// This rank's shards of all units, in the compute dtype: on the device, in host memory, or on disk behind a ring of
/// host buffers.
///
/// Threads: a parameter fault reads while the host lane's thread writes another unit's update. What lies in memory is
/// safe by their order (a fault waits for the unit's update first). The disk has a thread of its own, `disk_`, that
/// works off reads and writes in the order in which they were asked for, so that a read finds what was written before,
/// and reads ahead while both others compute.
class ShardHome {
 public:
  ShardHome(const Layout& layout, const ShardPolicy& policy, int rank, c10::Device device,
            const std::shared_ptr<Ledger>& ledger);
  ~ShardHome();
  ShardHome(const ShardHome&) = delete;
  ShardHome& operator=(const ShardHome&) = delete;

  Tier tier(int unit) const { return tier_[static_cast<std::size_t>(unit)]; }
  /// values: [shard].
  void set_initial(int unit, const at::Tensor& values);

  enum class Access : std::uint8_t { kRead, kChange, kReplace };
  /// body(the shard [shard]), kReplace: with undefined values. What reads it on a device has ended at the event that
  /// body returns. Waits for the disk. Throws IoError.
  void lend(int unit, Access access, const std::function<tiers::DeviceEvent(const at::Tensor&)>& body);
  /// Where the shard rests, if that is memory.
  const at::Tensor& resting(int unit) const { return resting_[static_cast<std::size_t>(unit)]; }
  /// lend(unit) will come soon: begins to read it where it lies on disk.
  void expect(int unit);
  /// Units that expect() can usefully be told of at a time.
  int read_ahead() const { return on_disk() ? policy_.swap.buffers - 2 : 0; }

  /// Takes shards that rest on the device to `to`, host memory or the device, bit for bit. tier: which of the two.
  void move(c10::Device to, Tier tier);

  /// Waits until the disk has all that was written.
  void finish();
  /// What ended the disk's thread, or null.
  std::exception_ptr failure() const;

 private:
  bool on_disk() const { return ring_.has_value(); }
  void track(const Unit& unit, Tier tier);

  const Layout& layout_;
  const ShardPolicy policy_;
  const std::shared_ptr<Ledger> ledger_;
  std::vector<Tier> tier_;            // by unit
  std::vector<at::Tensor> resting_;   // by unit
  std::vector<int> extent_;           // by unit, on disk
  std::vector<Ledger::Entry> bytes_;  // by unit
  std::optional<tiers::HostArena> arena_;
  std::optional<tiers::SwapRing> ring_;    // disk_'s
  std::unique_ptr<tiers::HostLane> disk_;  // after ring_: its jobs work on it
  Ledger::Entry disk_bytes_, ring_bytes_;
};

}  // namespace ballast
