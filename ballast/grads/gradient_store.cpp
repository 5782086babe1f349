#include "ballast/grads/gradient_store.h"

#include <ATen/ATen.h>

#include "ballast/grads/arithmetic.h"

namespace ballast {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
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

void GradientStore::contribute(int parameter, const at::Tensor& gradient) {
  const Layout::Place& place = layout_.places[static_cast<std::size_t>(parameter)];
  const Unit& unit = layout_.units[static_cast<std::size_t>(place.unit)];
  const Slot& slot = unit.slots[static_cast<std::size_t>(place.slot)];
  UnitGrads& mine = at(place.unit);
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;

  if (!mine.local.defined()) {
    mine.local = at::zeros({unit.padded}, dense.options().dtype(unit.compute_dtype).requires_grad(false));
    mine.local_bytes = ledger_->track(MemoryKind::kGrads, Tier::kDevice, bytes_of(mine.local));
  }
  active_[static_cast<std::size_t>(parameter)] = true;
  const auto into = [&] { return mine.local.narrow(0, slot.offset, slot.numel); };
  const auto index = static_cast<std::size_t>(place.slot);
  if (!mine.has[index]) {
    mine.has[index] = true;
    ++mine.contributed;
    into().view(dense.sizes()).copy_(dense);
    return;
  }
  // A second contribution: from here on the sum is formed in the accumulation dtype.
  if (mine.local.scalar_type() != policy_.accumulate) {
    at::Tensor wider = mine.local.to(policy_.accumulate);
    Ledger::Entry bytes = ledger_->track(MemoryKind::kGrads, Tier::kDevice, bytes_of(wider));
    mine.local = std::move(wider);
    mine.local_bytes = std::move(bytes);
  }
  mine.mixed = true;
  accumulate(into(), dense.reshape({-1}));
}

at::Tensor GradientStore::take(int unit) {
  UnitGrads& mine = at(unit);
  at::Tensor local = std::move(mine.local);
  mine.local.reset();
  mine.local_bytes = {};
  mine.has.assign(mine.has.size(), false);
  mine.contributed = 0;
  mine.mixed = false;
  return local;
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
  if (mine.local.defined()) mine.local.narrow(0, slot.offset, slot.numel).zero_();
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
  for (UnitGrads& unit : units_) {
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
  at(unit).sum.reset();
  at(unit).sum_bytes = {};
}

void GradientStore::clear() {
  for (const Unit& unit : layout_.units) {
    take(unit.id);
    release(unit.id);
  }
  active_.assign(active_.size(), false);
}

}  // namespace ballast
