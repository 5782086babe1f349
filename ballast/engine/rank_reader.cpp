#include "ballast/engine/rank_reader.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <span>

namespace ballast {
namespace {

c10::ScalarType dtype_of(const Unit& unit) { return unit.trainable ? at::kFloat : unit.compute_dtype; }

}  // namespace

RankReader::RankReader(ckpt::CheckpointReader& reader, const LoadPlan& plan, OptimizerStates& optimizer,
                       ParamStore& params, bool with_optimizer)
    : reader_(reader),
      plan_(plan),
      optimizer_(optimizer),
      params_(params),
      with_optimizer_(with_optimizer),
      keys_(optimizer.keys()) {}

std::int64_t RankReader::bytes(const Layout& layout) const {
  const Bytes bytes = bytes_by_life(layout);
  return bytes.lasting + bytes.passing;
}

void RankReader::reserve(const Layout& layout) {
  may_last_ = std::all_of(layout.units.begin(), layout.units.end(),
                          [&](const Unit& unit) { return !unit.trainable || has_any_of(unit); });
  const Bytes bytes = bytes_by_life(layout);
  lasting_.emplace(bytes.lasting, false, c10::kCPU);
  passing_.emplace(bytes.passing, false, c10::kCPU);
}

void RankReader::prepare(const Layout& layout) {
  const bool all = std::all_of(layout.units.begin(), layout.units.end(), [&](const Unit& unit) {
    return !unit.trainable || !optimizer_.on_disk(unit.id) || covers(unit);
  });
  if (all) refill_ = optimizer_.make_refill();
}

// A few chunks after the other: what a checkpoint keeps in one piece and two such parts share is read twice.
void RankReader::refill(const Layout& layout, bool keep) {
  if (!refill_) return;
  weights_.resize(layout.units.size());
  const auto begin = [&](int u, const SpareStates& chunk) {
    const Unit& unit = layout.units[static_cast<std::size_t>(u)];
    fill(unit, chunk);
    if (!keep) return;
    UnitValues& weights = weights_[static_cast<std::size_t>(u)];
    if (weights.empty()) {
      weights = shape_of(unit);
      weights.front().memory = new_memory(unit, weights.front());
    }
    const Range range = chunk.range;
    fill(unit, {range, 0, 1, false, weights.front().array(0).narrow(0, range.begin, range.size())});
  };
  optimizer_.run(*refill_, begin, [&] { complete(); });
}

UnitValues RankReader::read(const Unit& unit) {
  if (!has_any_of(unit)) return {};
  if (const auto u = static_cast<std::size_t>(unit.id); u < weights_.size() && !weights_[u].empty())
    return std::exchange(weights_[u], {});
  UnitValues values = shape_of(unit);
  for (SpareStates& part : values) {
    part.memory = new_memory(unit, part);
    fill(unit, part);
  }
  return values;
}

at::Tensor RankReader::new_memory(const Unit& unit, const SpareStates& part) {
  std::optional<tiers::HostArena>& arena = part.lasts ? lasting_ : passing_;
  return arena ? arena->allocate(part.numel(), dtype_of(unit)) : at::empty({part.numel()}, dtype_of(unit));
}

void RankReader::fill(const Unit& unit, const SpareStates& part) {
  if (unit.trainable && covers(unit))
    clear_padding(unit, part);
  else
    copy_current(unit, part);
  const Range range = in_unit(unit, part);
  for (const Slot& slot : unit.slots) {
    const Range piece = intersect(range, {slot.offset, slot.offset + slot.numel});
    if (record_of(slot) == nullptr || piece.empty()) continue;
    for (int a = part.first; a < part.first + part.arrays; ++a)
      read_state(*record_of(slot), a, {piece.begin - slot.offset, piece.end - slot.offset},
                 part.array(a).narrow(0, piece.begin - range.begin, piece.size()));
  }
}

at::Tensor RankReader::read_whole(const ckpt::Pieces& pieces, c10::ScalarType dtype, at::IntArrayRef shape) {
  at::Tensor values = at::empty(shape, dtype);
  read_later(pieces, dtype, {0, values.numel()}, values);
  return values;
}

void RankReader::complete() {
  reader_.complete();
  for (auto& [stored, to] : std::exchange(later_, {}))
    if (stored.scalar_type() != to.scalar_type()) to.copy_(stored);
}

const ckpt::ParameterRecord* RankReader::record_of(const Slot& slot) const {
  return plan_.parameters[static_cast<std::size_t>(slot.parameter)];
}

bool RankReader::has_any_of(const Unit& unit) const {
  return std::any_of(unit.slots.begin(), unit.slots.end(),
                     [&](const Slot& slot) { return record_of(slot) != nullptr; });
}

// All that is kept of the unit.
bool RankReader::covers(const Unit& unit) const {
  return with_optimizer_ && std::all_of(unit.slots.begin(), unit.slots.end(),
                                        [&](const Slot& slot) { return record_of(slot) != nullptr; });
}

Range RankReader::kept(const Unit& unit) const {
  return unit.trainable ? optimizer_.kept_range(unit.id) : params_.owned_range(unit.id);
}

Range RankReader::in_unit(const Unit& unit, const SpareStates& part) const {
  const std::int64_t begin = kept(unit).begin;
  return {begin + part.range.begin, begin + part.range.end};
}

UnitValues RankReader::shape_of(const Unit& unit) const {
  if (refill_ && unit.trainable && optimizer_.on_disk(unit.id))
    return {{.range = {0, kept(unit).size()}, .arrays = 1, .placed = true}};
  if (unit.trainable) return optimizer_.spares(unit.id, may_last_);
  return {{{0, kept(unit).size()}, 0, 1, false, {}}};
}

RankReader::Bytes RankReader::bytes_by_life(const Layout& layout) const {
  Bytes bytes;
  for (const Unit& unit : layout.units)
    for (const SpareStates& part : shape_of(unit))
      (part.lasts ? bytes.lasting : bytes.passing) += tiers::HostArena::bytes_of(part.numel(), dtype_of(unit));
  return bytes;
}

void RankReader::copy_current(const Unit& unit, const SpareStates& part) {
  if (!unit.trainable) {
    params_.with_owned(unit.id, ShardHome::Access::kRead, [&](const at::Tensor& now) { part.memory.copy_(now); });
    return;
  }
  for (const StateRun& now : optimizer_.read_all(unit.id, part.range).get())
    for (int a = part.first; a < part.first + part.arrays; ++a)
      part.array(a)
          .narrow(0, now.range.begin - part.range.begin, now.range.size())
          .copy_(now.arrays[static_cast<std::size_t>(a)]);
}

// What lies between the parameters.
void RankReader::clear_padding(const Unit& unit, const SpareStates& part) const {
  const Range range = in_unit(unit, part);
  std::int64_t end = range.begin;
  const auto clear_until = [&](std::int64_t begin) {
    const Range gap = intersect(range, {end, begin});
    for (int a = part.first; a < part.first + part.arrays && !gap.empty(); ++a)
      part.array(a).narrow(0, gap.begin - range.begin, gap.size()).zero_();
  };
  for (const Slot& slot : unit.slots) {
    clear_until(slot.offset);
    end = slot.offset + slot.numel;
  }
  clear_until(range.end);
}

void RankReader::read_state(const ckpt::ParameterRecord& record, int array, Range elements, const at::Tensor& to) {
  if (array == 0) return read_weights(record, elements, to);
  if (!with_optimizer_) return;
  if (!has_states(record, keys_)) {
    to.zero_();
    return;
  }
  read_later(record.states.at(keys_[static_cast<std::size_t>(array - 1)]), at::kFloat, elements, to);
}

// fp32 masters where the parameter was trainable, else what forward saw.
void RankReader::read_weights(const ckpt::ParameterRecord& record, Range elements, const at::Tensor& to) {
  const auto masters = record.states.find(kMasterKey);
  if (masters != record.states.end()) return read_later(masters->second, at::kFloat, elements, to);
  read_later(record.states.at(kParamKey), record.dtype, elements, to);
}

void RankReader::read_later(const ckpt::Pieces& pieces, c10::ScalarType dtype, Range elements, const at::Tensor& to) {
  const at::Tensor stored = to.scalar_type() == dtype ? to : at::empty({elements.size()}, dtype);
  reader_.read_later(pieces, dtype, elements.begin, elements.end,
                     {static_cast<std::byte*>(stored.mutable_data_ptr()), stored.nbytes()});
  later_.emplace_back(stored, to);
}

}  // namespace ballast
