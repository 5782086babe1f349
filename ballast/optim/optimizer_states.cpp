#include "ballast/optim/optimizer_states.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/error.h"

namespace ballast {
namespace {

bool uses_momentum(const OptimizerConfig& config) {
  return config.hyper.momentum != 0 || std::any_of(config.groups.begin(), config.groups.end(),
                                                   [](const OptimizerGroup& g) { return g.hyper.momentum != 0; });
}

}  // namespace

int OptimizerStates::moments(const OptimizerConfig& config) {
  switch (config.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      return 2;
    case OptimizerType::kLion:
      return 1;
    case OptimizerType::kSgd:
      return uses_momentum(config) ? 1 : 0;
  }
  return 0;
}

OptimizerStates::OptimizerStates(const Layout& layout, const OptimizerConfig& config, const OptimizerPolicy& policy,
                                 int rank, c10::Device device, std::shared_ptr<Ledger> ledger)
    : layout_(layout),
      config_(config),
      policy_(policy),
      rank_(rank),
      device_(device),
      states_device_(policy.tier == Tier::kDevice ? device : c10::Device(c10::kCPU)),
      ledger_(std::move(ledger)),
      units_(layout.units.size()),
      steps_(layout.parameters.size(), 0),
      fresh_(layout.parameters.size(), true) {}

Range OptimizerStates::kept_range(int unit) const {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  return policy_.whole ? Range{0, u.padded} : u.shard_of(rank_);
}

void OptimizerStates::set_initial(const Unit& unit, const at::Tensor& original) {
  UnitStates& mine = units_[static_cast<std::size_t>(unit.id)];
  const Range range = kept_range(unit.id);
  mine.master_is_bound = unit.compute_dtype == at::kFloat && policy_.tier == Tier::kDevice;
  const bool pin = policy_.pin_memory && !device_.is_cpu() && states_device_.is_cpu();
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(states_device_).pinned_memory(pin);
  if (!mine.master_is_bound) {
    mine.master = at::empty({range.size()}, options);
    mine.master.copy_(original.narrow(0, range.begin, range.size()));
  }
  const int moments = OptimizerStates::moments(config_);
  if (moments > 0) mine.first = at::zeros({range.size()}, options);
  if (moments > 1) mine.second = at::zeros({range.size()}, options);
  mine.bytes = ledger_->track(MemoryKind::kOptimizer, policy_.tier,
                              (moments + (mine.master_is_bound ? 0 : 1)) * range.size() * 4);
}

void OptimizerStates::bind(int unit, const at::Tensor& owned) {
  UnitStates& mine = units_[static_cast<std::size_t>(unit)];
  mine.bound = owned;
  if (mine.master_is_bound) mine.master = owned;
}

const OptimizerHyper& OptimizerStates::hyper(int group) const {
  return group == 0 ? config_.hyper : config_.groups[static_cast<std::size_t>(group - 1)].hyper;
}

// Neighbouring parameters with equal values share a segment, the padding between them included: its gradient and
// moments are zero, and no rule makes anything but zero of that.
std::vector<OptimizerStates::Segment> OptimizerStates::segments(int unit, const UpdateStep& step) {
  const Range kept = kept_range(unit);
  std::vector<Segment> result;
  for (const Slot& slot : layout_.units[static_cast<std::size_t>(unit)].slots) {
    const auto p = static_cast<std::size_t>(slot.parameter);
    if (!step.active[p]) continue;
    const std::int64_t count = ++steps_[p];
    const bool fresh = fresh_[p];
    fresh_[p] = false;
    const Range part = intersect(kept, {slot.offset, slot.offset + slot.numel});
    if (part.empty()) continue;
    const Range local{part.begin - kept.begin, part.end - kept.begin};
    const int group = layout_.parameters[p].group;
    const bool follows = !result.empty() && result.back().group == group && result.back().step == count &&
                         result.back().fresh == fresh && local.begin - result.back().range.end < kSlotAlign;
    if (follows) {
      result.back().range.end = local.end;
    } else {
      result.push_back({local, group, count, fresh});
    }
  }
  return result;
}

void OptimizerStates::update(int unit, const at::Tensor& sum, const UpdateStep& step) {
  UnitStates& mine = units_[static_cast<std::size_t>(unit)];
  for (const Segment& segment : segments(unit, step)) {
    if (states_device_.is_cpu()) {
      update_on_host(mine, sum, segment, step);
    } else {
      update_on_device(mine, sum, segment, step);
    }
  }
}

std::vector<std::string> OptimizerStates::keys() const {
  switch (moments(config_)) {
    case 2:
      return {"exp_avg", "exp_avg_sq"};
    case 1:
      return {config_.type == OptimizerType::kSgd ? "momentum_buffer" : "exp_avg"};
    default:
      return {};
  }
}

const at::Tensor& OptimizerStates::state(int unit, const std::string& key) const {
  const UnitStates& mine = units_[static_cast<std::size_t>(unit)];
  if (key.empty()) return mine.master;
  const std::vector<std::string> known = keys();
  if (!known.empty() && key == known[0]) return mine.first;
  if (known.size() > 1 && key == known[1]) return mine.second;
  std::string list = kStepKey;
  for (const std::string& name : known) list += ", " + name;
  throw UseError("optim.state", "this optimizer has no state of that name (", key, "; it has: ", list, ")");
}

void OptimizerStates::refresh_bound(int unit, Range elements) {
  UnitStates& mine = units_[static_cast<std::size_t>(unit)];
  if (mine.master_is_bound || elements.empty()) return;
  mine.bound.narrow(0, elements.begin, elements.size()).copy_(mine.master.narrow(0, elements.begin, elements.size()));
}

}  // namespace ballast
