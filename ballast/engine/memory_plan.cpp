#include "ballast/engine/memory_plan.h"

#include <algorithm>
#include <deque>
#include <numeric>
#include <vector>

#include "ballast/engine/policies.h"
#include "ballast/grads/host_sums.h"
#include "ballast/params/fault_order.h"

namespace ballast {
namespace {

std::int64_t size_of(c10::ScalarType dtype) { return static_cast<std::int64_t>(c10::elementSize(dtype)); }

/// Plays the engine's allocations in their order. Each method stands for the part of the engine that it is named after.
class Rehearsal {
 public:
  Rehearsal(const Layout& layout, const Config& config, const MemoryPlanOptions& options)
      : layout_(layout),
        policies_(make_policies(config, options.world)),
        states_tier_(place_states(layout, policies_.optimizer)),
        shards_tier_(policies_.params.sharded ? place_shards(layout, policies_.params.shards)
                                              : std::vector<Tier>(layout.units.size(), Tier::kDevice)),
        moments_(OptimizerStates::moments(config.optimizer)),
        options_(options),
        units_(layout.units.size()) {}

  std::shared_ptr<Ledger> run() {
    build();
    for (int window = 0; window < 2; ++window) {
      for (std::int64_t b = 0; b < options_.backwards; ++b) backward();
      step();
    }
    return ledger_;
  }

 private:
  struct UnitBytes {
    Ledger::Entry params, optimizer, local, sum, gathered;  // optimizer: on the device
    bool wide = false;                                      // local is in the accumulation dtype
    bool sum_stays = false;                                 // off the device, from the start to the end
    bool persistent = false;
    bool touched = false;  // since it was gathered
  };
  struct Flight {
    int unit;
    Ledger::Entry bytes;
  };

  const Unit& unit(int id) const { return layout_.units[static_cast<std::size_t>(id)]; }
  UnitBytes& bytes(int id) { return units_[static_cast<std::size_t>(id)]; }
  bool alone() const { return options_.world == 1; }

  // ParamStore and OptimizerStates.
  void build() {
    std::int64_t persistent_left = policies_.params.persistent_total;
    build_shards_on_disk();
    for (const Unit& u : layout_.units) {
      UnitBytes& mine = bytes(u.id);
      const std::int64_t kept = policies_.params.sharded ? u.shard : u.padded;
      const Tier shard_tier = shards_tier_[static_cast<std::size_t>(u.id)];
      if (shard_tier != Tier::kNvme)
        mine.params = ledger_->track(MemoryKind::kParams, shard_tier, kept * size_of(u.compute_dtype));
      if (u.trainable) {
        const Tier tier = states_tier_[static_cast<std::size_t>(u.id)];
        const bool bound =
            u.compute_dtype == c10::kFloat && tier == Tier::kDevice && !policies_.optimizer.masters_apart;
        const std::int64_t states = policies_.optimizer.whole ? u.padded : u.shard;
        if (tier == Tier::kDevice)
          mine.optimizer = ledger_->track(MemoryKind::kOptimizer, tier, (moments_ + (bound ? 0 : 1)) * states * 4);
        mine.sum_stays = tier != Tier::kDevice && policies_.grads.tier != Tier::kDevice;
        if (mine.sum_stays && policies_.grads.tier == Tier::kHost)
          mine.sum = ledger_->track(MemoryKind::kGrads, Tier::kHost, kept_sum(u.id));
      }
      mine.persistent =
          policies_.params.sharded && u.numel <= policies_.params.persistent_unit && u.numel <= persistent_left;
      if (mine.persistent) {
        persistent_left -= u.numel;
        map(u.id);
      }
    }
    if (policies_.optimizer.tier != Tier::kDevice) build_off_device();
  }

  void keep(MemoryKind kind, Tier tier, std::int64_t bytes) {
    off_device_.push_back(ledger_->track(kind, tier, bytes));
  }
  // SwapRing.
  void build_ring(MemoryKind kind, const std::vector<std::int64_t>& extents, const tiers::SwapOptions& swap) {
    const auto ring = tiers::SwapRing::bytes_of(extents, swap.buffers);
    keep(kind, Tier::kNvme, ring.file);
    keep(MemoryKind::kStaging, Tier::kHost, ring.buffers);
  }
  // ShardHome.
  void build_shards_on_disk() {
    std::vector<std::int64_t> extents;
    for (const Unit& u : layout_.units)
      if (shards_tier_[static_cast<std::size_t>(u.id)] == Tier::kNvme)
        extents.push_back(u.shard * size_of(u.compute_dtype));
    if (!extents.empty()) build_ring(MemoryKind::kParams, extents, policies_.params.shards.swap);
  }
  // StateChunks, UploadRing and the slots and pieces of HostSums.
  void build_off_device() {
    std::vector<std::int64_t> sizes;  // floats by chunk
    std::int64_t longest_copy = 0;
    for (const StateChunk& chunk : cut_states(layout_, policies_.optimizer, states_tier_)) {
      sizes.push_back((1 + moments_) * chunk.range.size());
      longest_copy = std::max(longest_copy, chunk.range.size() * size_of(unit(chunk.unit).compute_dtype));
    }
    if (policies_.optimizer.tier == Tier::kNvme) {
      build_ring(MemoryKind::kOptimizer, StateChunks::extents(sizes), policies_.optimizer.swap);
    } else {
      keep(MemoryKind::kOptimizer, Tier::kHost, 4 * std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
    }
    keep(MemoryKind::kStaging, Tier::kHost, UploadRing::bytes(longest_copy, options_.device));
    std::vector<std::int64_t> sums;
    for (const Unit& u : layout_.units)
      if (bytes(u.id).sum_stays) sums.push_back(kept_sum(u.id) / size_of(policies_.grads.accumulate));
    const HostSums::Options sums_options = host_sums_options(policies_);
    keep(MemoryKind::kStaging, Tier::kHost, HostSums::staging_bytes(sums, options_.device, sums_options));
    if (sums_options.swap && !sums.empty())
      build_ring(MemoryKind::kGrads,
                 HostSums::extents(sums, policies_.grads.keep_whole_sum ? options_.world : 1, sums_options),
                 *sums_options.swap);
  }

  std::int64_t kept_sum(int id) const {
    return (policies_.grads.keep_whole_sum ? unit(id).padded : unit(id).shard) * size_of(policies_.grads.accumulate);
  }

  // Residency, with the same decisions in the same order.
  void map(int id) {
    UnitBytes& mine = bytes(id);
    mine.gathered =
        ledger_->track(MemoryKind::kGathered, Tier::kDevice, unit(id).padded * size_of(unit(id).compute_dtype));
    mine.touched = false;
  }
  bool mapped(int id) { return bytes(id).gathered.bytes() > 0; }
  void gather(int id) {
    map(id);
    mapped_order_.push_back(id);
    live_ += unit(id).padded;
    ahead_ += unit(id).padded;
  }
  void drop(int id) {
    live_ -= unit(id).padded;
    if (!bytes(id).touched) ahead_ -= unit(id).padded;
    bytes(id).gathered = {};
    mapped_order_.erase(std::find(mapped_order_.begin(), mapped_order_.end(), id));
  }
  bool make_room(std::int64_t elements, int in_use, bool for_prefetch) {
    const std::int64_t limit = policies_.params.limits.max_live;
    for (std::size_t i = 0; live_ + elements > limit && i < mapped_order_.size();) {
      const int oldest = mapped_order_[i];
      if (oldest == in_use || (for_prefetch && !bytes(oldest).touched)) {
        ++i;
        continue;
      }
      drop(oldest);
    }
    return live_ + elements <= limit;
  }
  void touch(int id) {
    UnitBytes& mine = bytes(id);
    if (!policies_.params.sharded || mine.persistent || (mapped(id) && mine.touched)) return;
    if (!mapped(id)) {
      make_room(unit(id).padded, id, false);
      gather(id);
    }
    ahead_ -= unit(id).padded;
    mine.touched = true;
    order_.record(id);
    prefetch(id);
  }
  void prefetch(int in_use) {
    FaultOrder::State state = order_.now();
    for (std::size_t looked = 0; looked < units_.size(); ++looked) {
      const int next = order_.predict(state);
      if (next < 0) return;
      state = {state.last, next};
      if (mapped(next)) {
        if (bytes(next).touched) return;
        continue;
      }
      if (ahead_ + unit(next).padded > policies_.params.limits.prefetch) return;
      if (!make_room(unit(next).padded, in_use, true)) return;
      gather(next);
    }
  }

  // GradientStore and Reducer.
  void contribute(int id) {
    UnitBytes& mine = bytes(id);
    const std::int64_t padded = unit(id).padded;
    if (mine.local.bytes() == 0) {
      mine.local = ledger_->track(MemoryKind::kGrads, Tier::kDevice, padded * size_of(unit(id).compute_dtype));
    } else if (!mine.wide && unit(id).compute_dtype != policies_.grads.accumulate) {
      mine.local = ledger_->track(MemoryKind::kGrads, Tier::kDevice, padded * size_of(policies_.grads.accumulate));
    }
    mine.wide = contributions_ > 0;
  }
  void land(int id) {
    if (!bytes(id).sum_stays && bytes(id).sum.bytes() == 0)
      bytes(id).sum = ledger_->track(MemoryKind::kGrads, Tier::kDevice, kept_sum(id));
  }
  void land_oldest() {
    in_flight_elements_ -= unit(flights_.front().unit).padded;
    land(flights_.front().unit);
    flights_.pop_front();
  }
  void start(int id) {
    UnitBytes& mine = bytes(id);
    const c10::ScalarType travels =
        mine.wide ? policies_.grads.accumulate : policies_.grads.communicate.value_or(unit(id).compute_dtype);
    mine.local = {};
    if (alone()) {
      land(id);
      return;
    }
    while (!flights_.empty() && in_flight_elements_ + unit(id).padded > policies_.grads.max_in_flight) land_oldest();
    flights_.push_back(
        {id, ledger_->track(MemoryKind::kStaging, Tier::kDevice, 2 * unit(id).padded * size_of(travels))});
    in_flight_elements_ += unit(id).padded;
  }
  bool starts_early(int id) const {
    if (!policies_.grads.reduce_every_backward || !policies_.grads.overlap || held_back_) return false;
    if (alone()) return true;
    const bool fits = flights_.empty() || in_flight_elements_ + unit(id).padded <= policies_.grads.max_in_flight;
    return !unit(id).leaf && (fits || !options_.collectives_on_host);
  }
  void reduce_held() {
    for (int id = static_cast<int>(units_.size()) - 1; id >= 0; --id)
      if (bytes(id).local.bytes() > 0) start(id);
    while (!flights_.empty()) land_oldest();
    held_back_ = false;
  }

  void backward() {
    const int last = static_cast<int>(units_.size()) - 1;
    for (int id = 0; id <= last; ++id) touch(id);
    for (int id = last; id >= 0; --id) {
      touch(id);
      if (!unit(id).trainable) continue;
      contribute(id);
      if (starts_early(id)) {
        start(id);
      } else {
        held_back_ = true;  // the order is fixed: those behind it wait too
      }
    }
    ++contributions_;
    if (policies_.grads.reduce_every_backward) {
      reduce_held();
      contributions_ = 0;
    }
  }
  void step() {
    reduce_held();
    contributions_ = 0;
    for (const Unit& u : layout_.units) {
      UnitBytes& mine = bytes(u.id);
      if (!mine.sum_stays) mine.sum = {};
      mine.wide = false;
      if (u.trainable && !mine.persistent && mapped(u.id)) drop(u.id);  // its shard has new values
    }
  }

  const Layout& layout_;
  Policies policies_;
  std::vector<Tier> states_tier_, shards_tier_;  // by unit
  int moments_;
  MemoryPlanOptions options_;
  std::shared_ptr<Ledger> ledger_ = Ledger::create();
  std::vector<UnitBytes> units_;
  std::vector<Ledger::Entry> off_device_;
  std::vector<int> mapped_order_;  // oldest first
  FaultOrder order_;
  std::deque<Flight> flights_;
  std::int64_t live_ = 0, ahead_ = 0;
  std::int64_t in_flight_elements_ = 0, contributions_ = 0;
  bool held_back_ = false;
};

}  // namespace

std::shared_ptr<Ledger> plan_memory(const Layout& layout, const Config& config, const MemoryPlanOptions& options) {
  return Rehearsal(layout, config, options).run();
}

}  // namespace ballast
