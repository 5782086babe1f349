#include "ballast/params/shard_home.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/error.h"
#include "ballast/base/log.h"

namespace ballast {
namespace {

std::int64_t bytes_of(const Unit& unit) {
  return unit.shard * static_cast<std::int64_t>(c10::elementSize(unit.compute_dtype));
}

}  // namespace

std::vector<Tier> place_shards(const Layout& layout, const ShardPolicy& policy) {
  std::vector<Tier> tier(layout.units.size(), policy.tier);
  if (policy.tier != Tier::kNvme) return tier;
  std::int64_t in_host = 0;
  for (const Unit& unit : layout.units) {
    if (unit.shard == 0 || in_host + unit.shard <= policy.in_host) {
      tier[static_cast<std::size_t>(unit.id)] = Tier::kHost;
      in_host += unit.shard;
    } else if (unit.shard > policy.longest) {
      throw ConfigError("params.place_shards", "a unit's shard is longer than a buffer between disk and device (unit ",
                        unit.name, ": ", unit.shard,
                        " elements, zero_optimization.offload_param.buffer_size = ", policy.longest,
                        "; set buffer_size to at least ", unit.shard, ")");
    }
  }
  return tier;
}

ShardHome::ShardHome(const Layout& layout, const ShardPolicy& policy, int rank, c10::Device device,
                     const std::shared_ptr<Ledger>& ledger)
    : layout_(layout),
      policy_(policy),
      ledger_(ledger),
      tier_(place_shards(layout, policy)),
      resting_(layout.units.size()),
      extent_(layout.units.size(), -1),
      bytes_(layout.units.size()) {
  std::int64_t planned = 0;
  std::vector<std::int64_t> extents;
  for (const Unit& unit : layout_.units) {
    if (tier(unit.id) == Tier::kHost) planned += tiers::HostArena::bytes_of(unit.shard, unit.compute_dtype);
    if (tier(unit.id) != Tier::kNvme) continue;
    extent_[static_cast<std::size_t>(unit.id)] = static_cast<int>(extents.size());
    extents.push_back(bytes_of(unit));
  }
  if (planned > 0) arena_.emplace(planned, policy_.pin_memory, device);
  if (extents.empty()) return;
  disk_ = std::make_unique<tiers::HostLane>(c10::kCPU, 1);
  disk_->run([&] { ring_.emplace("parameters.swap", extents, policy_.swap, device, rank); });
  disk_bytes_ = ledger->track(MemoryKind::kParams, Tier::kNvme, ring_->bytes().file);
  ring_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, ring_->bytes().buffers);
}

ShardHome::~ShardHome() {
  if (!disk_) return;
  try {
    disk_->run([&] { ring_.reset(); });  // a disk queue belongs to the thread that drives it
  } catch (const std::exception&) {      // an error ended that thread and was thrown when it came
  }
}

void ShardHome::track(const Unit& unit, Tier tier) {
  bytes_[static_cast<std::size_t>(unit.id)] = ledger_->track(MemoryKind::kParams, tier, bytes_of(unit));
}

void ShardHome::set_initial(int unit_id, const at::Tensor& values) {
  const Unit& unit = layout_.units[static_cast<std::size_t>(unit_id)];
  at::Tensor& resting = resting_[static_cast<std::size_t>(unit_id)];
  switch (tier(unit_id)) {
    case Tier::kDevice:
      resting = values.clone();
      break;
    case Tier::kHost:
      resting = arena_ ? arena_->allocate(unit.shard, unit.compute_dtype).copy_(values) : values.cpu();
      break;
    case Tier::kNvme:
      return lend(unit_id, Access::kReplace, [&](const at::Tensor& to) -> tiers::DeviceEvent {
        to.copy_(values);
        return {};
      });
  }
  track(unit, tier(unit_id));
}

void ShardHome::lend(int unit, Access access, const std::function<tiers::DeviceEvent(const at::Tensor&)>& body) {
  const int extent = extent_[static_cast<std::size_t>(unit)];
  if (extent < 0) {
    body(resting(unit));
    return;
  }
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  at::Tensor shard;
  const auto opened = disk_->submit(
      [&] {
        shard = (access == Access::kReplace ? ring_->open_zeros(extent) : ring_->open(extent)).view(u.compute_dtype);
      },
      "parameters");
  disk_->wait(opened, "shard of", u.name);
  tiers::DeviceEvent read_until = body(shard);
  disk_->submit([this, extent, changed = access != Access::kRead,
                 read_until = std::move(read_until)] { ring_->close(extent, changed, read_until); },
                "parameters");
}

void ShardHome::expect(int unit) {
  if (const int extent = extent_[static_cast<std::size_t>(unit)]; extent >= 0)
    disk_->submit([this, extent] { ring_->expect(extent); }, "parameters");
}

void ShardHome::move(c10::Device to, Tier tier) {
  for (const Unit& unit : layout_.units) {
    at::Tensor& resting = resting_[static_cast<std::size_t>(unit.id)];
    resting = resting.to(to);
    track(unit, tier);
  }
}

void ShardHome::finish() {
  if (disk_) disk_->run([&] { ring_->finish(); });
}

std::exception_ptr ShardHome::failure() const {
  if (!disk_) return nullptr;
  try {
    disk_->rethrow_failure();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace ballast
