#include "ballast/grads/gradient_store.h"

#include <ATen/ATen.h>
#include <c10/util/strides.h>

#include "ballast/grads/arithmetic.h"
#include "ballast/tiers/device_stream.h"

namespace ballast {
namespace {

// What arrives of a unit waits up to so many bytes: they are there beside the unit's flat buffer while they are copied.
// Copies that are larger gain nothing from company.
constexpr std::int64_t kGatherBytes = std::int64_t{4} << 20;

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

// Only a gradient that has its memory to itself: another owner may write to it, and a part of a larger block would keep
// all of it. While a hook runs, autograd's list of inputs is a second owner, which never writes.
bool may_wait(const at::Tensor& gradient) {
  if (gradient.use_count() > 1 || !gradient.has_storage()) return false;
  const c10::Storage& memory = gradient.storage();
  return memory.use_count() <= 2 && static_cast<std::int64_t>(memory.nbytes()) == bytes_of(gradient);
}

}  // namespace

GradientStore::GradientStore(const Layout& layout, const GradPolicy& policy, int rank, std::shared_ptr<Ledger> ledger,
                             std::unique_ptr<HostSums> host)
    : layout_(layout),
      policy_(policy),
      rank_(rank),
      ledger_(std::move(ledger)),
      host_(std::move(host)),
      units_(layout.units.size()),
      active_(layout.parameters.size(), false) {
  for (const Unit& unit : layout_.units) at(unit.id).has.assign(unit.slots.size(), false);
}

void GradientStore::contribute(int parameter, at::Tensor gradient) {
  const Layout::Place& place = layout_.places[static_cast<std::size_t>(parameter)];
  const Unit& unit = layout_.units[static_cast<std::size_t>(place.unit)];
  const Slot& slot = unit.slots[static_cast<std::size_t>(place.slot)];
  UnitGrads& mine = at(place.unit);
  if (gradient.is_sparse()) gradient = gradient.to_dense();

  if (mine.contributed == 0)
    mine.local_bytes = ledger_->track(MemoryKind::kGrads, Tier::kDevice,
                                      unit.padded * static_cast<std::int64_t>(c10::elementSize(unit.compute_dtype)));
  active_[static_cast<std::size_t>(parameter)] = true;
  const auto index = static_cast<std::size_t>(place.slot);
  if (!mine.has[index]) {
    mine.has[index] = true;
    ++mine.contributed;
    mine.arrived_bytes += bytes_of(gradient);
    const bool wait = mine.arrived_bytes < kGatherBytes && may_wait(gradient);
    mine.arrivals.push_back({place.slot, std::move(gradient)});
    if (!wait || complete(place.unit)) gather_arrivals(place.unit);
    return;
  }
  gather_arrivals(place.unit);
  // A second contribution: from here on the sum is formed in the accumulation dtype.
  if (mine.local.scalar_type() != policy_.accumulate) {
    at::Tensor wider = mine.local.to(policy_.accumulate);
    Ledger::Entry bytes = ledger_->track(MemoryKind::kGrads, Tier::kDevice, bytes_of(wider));
    mine.local = std::move(wider);
    mine.local_bytes = std::move(bytes);
  }
  mine.mixed = true;
  accumulate(mine.local.narrow(0, slot.offset, slot.numel), gradient.reshape({-1}));
}

// One copy for all that has arrived: on a device the launch of a copy takes longer than the copy of a small gradient.
void GradientStore::gather_arrivals(int unit) {
  UnitGrads& mine = at(unit);
  if (mine.arrivals.empty()) return;
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  if (!mine.local.defined())
    mine.local =
        at::zeros({u.padded}, mine.arrivals.front().gradient.options().dtype(u.compute_dtype).requires_grad(false));
  std::vector<at::Tensor> from, into;
  for (const Arrival& arrival : mine.arrivals) {
    const Slot& slot = u.slots[static_cast<std::size_t>(arrival.slot)];
    if (slot.numel == 0) continue;
    const at::IntArrayRef sizes = arrival.gradient.sizes();
    from.push_back(arrival.gradient);
    into.push_back(mine.local.as_strided(sizes, c10::contiguous_strides(sizes), slot.offset));
  }
  if (from.size() == 1) {
    into.front().copy_(from.front());
  } else if (!from.empty()) {
    at::_foreach_copy_(into, from);
  }
  mine.arrivals.clear();
  mine.arrived_bytes = 0;
}

const at::Tensor& GradientStore::local(int unit) {
  gather_arrivals(unit);
  return at(unit).local;
}

at::Tensor GradientStore::take(int unit) {
  gather_arrivals(unit);
  at::Tensor local = std::move(at(unit).local);
  tiers::keep_for_current_stream(local);  // a hook may have made it, on autograd's stream
  drop(unit);
  return local;
}

void GradientStore::drop(int unit) {
  UnitGrads& mine = at(unit);
  mine.local.reset();
  mine.local_bytes = {};
  mine.arrivals.clear();
  mine.arrived_bytes = 0;
  mine.has.assign(mine.has.size(), false);
  mine.contributed = 0;
  mine.mixed = false;
}

void GradientStore::set_sum(UnitGrads& unit, at::Tensor sum) {
  unit.sum_bytes = ledger_->track(MemoryKind::kGrads, Tier::kDevice, bytes_of(sum));
  unit.sum = std::move(sum);
}

void GradientStore::land(int unit, at::Tensor sum) {
  UnitGrads& mine = at(unit);
  if (on_host(unit)) {
    host_->land(unit, sum, !mine.landed);
  } else if (mine.landed) {
    accumulate(mine.sum, sum);
  } else {
    set_sum(mine, sum.scalar_type() == policy_.accumulate ? std::move(sum) : sum.to(policy_.accumulate));
  }
  mine.landed = true;
}

at::Tensor GradientStore::landed(int unit) {
  if (!has_landed(unit)) return {};
  return on_host(unit) ? host_->landed(unit) : at(unit).sum;
}

LandedSum GradientStore::landing(int unit) { return on_host(unit) ? LandedSum(*host_, unit) : LandedSum(at(unit).sum); }

void GradientStore::add_squares(int unit, SquareSums& squares) {
  const int first_rank = policy_.keep_whole_sum ? 0 : rank_;
  if (!has_landed(unit)) return;
  if (on_host(unit)) return host_->add_squares(unit, squares, first_rank);
  const at::Tensor& sum = at(unit).sum;
  const std::int64_t shard = layout_.units[static_cast<std::size_t>(unit)].shard;
  for (std::int64_t begin = 0; begin < sum.numel(); begin += shard)
    squares.add(first_rank + begin / shard, sum.narrow(0, begin, shard));
}

Range GradientStore::landed_range(int unit) const {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  return policy_.keep_whole_sum ? Range{0, u.padded} : u.shard_of(rank_);
}

void GradientStore::overwrite(int parameter, const at::Tensor& sum) {
  const Layout::Place& place = layout_.places[static_cast<std::size_t>(parameter)];
  const Slot& slot = layout_.slot_of(parameter);
  UnitGrads& mine = at(place.unit);
  if (holds(place.unit)) local(place.unit).narrow(0, slot.offset, slot.numel).zero_();
  const Range range = landed_range(place.unit);
  const Range part = intersect(range, {slot.offset, slot.offset + slot.numel});
  const Range local = part.empty() ? Range{0, 0} : Range{part.begin - range.begin, part.end - range.begin};
  const at::Tensor values = sum.reshape({-1}).narrow(0, part.empty() ? 0 : part.begin - slot.offset, local.size());
  if (on_host(place.unit)) {
    host_->write(place.unit, local, values, /*first=*/!mine.landed);
  } else {
    if (!mine.landed)
      set_sum(mine, at::zeros({range.size()}, at::TensorOptions(policy_.accumulate).device(sum.device())));
    mine.sum.narrow(0, local.begin, local.size()).copy_(values);
  }
  mine.landed = true;
  active_[static_cast<std::size_t>(parameter)] = true;
}

void GradientStore::move(c10::Device to, Tier tier) {
  for (const Unit& u : layout_.units) {
    UnitGrads& unit = at(u.id);
    gather_arrivals(u.id);
    if (unit.local.defined()) {
      unit.local = unit.local.to(to);
      unit.local_bytes = ledger_->track(MemoryKind::kGrads, tier, bytes_of(unit.local));
    }
    if (unit.sum.defined()) {
      unit.sum = unit.sum.to(to);
      unit.sum_bytes = ledger_->track(MemoryKind::kGrads, tier, bytes_of(unit.sum));
    }
  }
}

void GradientStore::release(int unit) {
  at(unit).landed = false;
  tiers::keep_for_current_stream(at(unit).sum);  // as above
  at(unit).sum.reset();
  at(unit).sum_bytes = {};
}

void GradientStore::clear() {
  for (const Unit& unit : layout_.units) {
    drop(unit.id);
    release(unit.id);
  }
  active_.assign(active_.size(), false);
}

}  // namespace ballast
