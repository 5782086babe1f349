#include "ballast/optim/optimizer_states.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/error.h"
#include "ballast/base/log.h"

namespace ballast {

using Access = StateChunks::Access;

namespace {

bool uses_momentum(const OptimizerConfig& config) {
  return config.hyper.momentum != 0 || std::any_of(config.groups.begin(), config.groups.end(),
                                                   [](const OptimizerGroup& g) { return g.hyper.momentum != 0; });
}

}  // namespace

std::vector<Tier> place_states(const Layout& layout, const OptimizerPolicy& policy) {
  std::vector<Tier> tier(layout.units.size(), Tier::kDevice);
  if (policy.tier == Tier::kDevice) return tier;
  double total = 0, placed = 0;
  for (const Unit& unit : layout.units)
    if (unit.trainable) total += static_cast<double>(unit.numel);
  for (const Unit& unit : layout.units) {
    if (!unit.trainable) continue;
    const bool stays = placed + static_cast<double>(unit.numel) <= (1 - policy.offloaded) * total;
    if (!stays) tier[static_cast<std::size_t>(unit.id)] = policy.tier;
    placed += static_cast<double>(unit.numel);
  }
  return tier;
}

std::vector<StateChunk> cut_states(const Layout& layout, const OptimizerPolicy& policy, const std::vector<Tier>& tier) {
  std::vector<StateChunk> chunks;
  for (const Unit& unit : layout.units) {
    if (!unit.trainable || tier[static_cast<std::size_t>(unit.id)] == Tier::kDevice) continue;
    const std::int64_t kept = policy.whole ? unit.padded : unit.shard;
    for (std::int64_t begin = 0; begin < kept; begin += policy.chunk)
      chunks.push_back({unit.id, {begin, std::min(begin + policy.chunk, kept)}});
  }
  return chunks;
}

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
                                 std::vector<Tier> tier, int rank, c10::Device device, tiers::HostLane* lane,
                                 std::shared_ptr<Ledger> ledger)
    : layout_(layout),
      config_(config),
      policy_(policy),
      rank_(rank),
      device_(device),
      lane_(lane),
      ledger_(std::move(ledger)),
      units_(layout.units.size()),
      steps_(layout.parameters.size(), 0),
      fresh_(layout.parameters.size(), true) {
  for (const Unit& unit : layout.units) {
    at(unit.id).tier = tier[static_cast<std::size_t>(unit.id)];
    at(unit.id).master_is_bound = unit.compute_dtype == at::kFloat && on_device(unit.id) && !policy_.masters_apart;
  }
  if (lane_ == nullptr) return;
  cuts_ = cut_states(layout_, policy_, tier);
  make_chunks();
}

void OptimizerStates::make_chunks() {
  std::int64_t longest_copy = 0;  // bytes
  for (std::size_t c = 0; c < cuts_.size(); ++c) {
    const StateChunk& chunk = cuts_[c];
    UnitStates& mine = at(chunk.unit);
    if (mine.chunks++ == 0) mine.first_chunk = static_cast<int>(c);
    const auto element =
        static_cast<std::int64_t>(c10::elementSize(layout_.units[static_cast<std::size_t>(chunk.unit)].compute_dtype));
    longest_copy = std::max(longest_copy, chunk.range.size() * element);
  }
  std::vector<std::int64_t> sizes;
  for (const StateChunk& chunk : cuts_) sizes.push_back(arrays() * chunk.range.size());
  // On the lane, as all later use: a disk queue belongs to the thread that drives it.
  lane_->run([&] {
    chunks_ = policy_.tier == Tier::kNvme ? std::make_unique<StateChunks>(sizes, policy_.swap, rank_, ledger_)
                                          : std::make_unique<StateChunks>(sizes, ledger_);
  });
  uploads_.emplace(longest_copy, policy_.pin_memory, device_, ledger_);
}

Range OptimizerStates::kept_range(int unit) const {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  return policy_.whole ? Range{0, u.padded} : u.shard_of(rank_);
}

void OptimizerStates::for_chunks(int unit, Access access, const std::function<void(float*, std::int64_t, Range)>& body,
                                 Range elements) {
  const UnitStates& mine = at(unit);
  const int all = static_cast<int>(cuts_.size());
  for (int c = mine.first_chunk; c < mine.first_chunk + mine.chunks; ++c) {
    const Range range = cuts_[static_cast<std::size_t>(c)].range;
    if (intersect(elements, range).empty()) continue;
    float* floats = chunks_->open(c, access);
    // The ring's other buffers, but one for the chunk that is being written. After the last chunk come the first: the
    // next step begins with them.
    const int most_ahead = access == Access::kReplace ? 0 : std::min(policy_.swap.buffers - 2, all - 1);
    for (int ahead = 1; ahead <= most_ahead; ++ahead) chunks_->expect((c + ahead) % all);
    body(floats, range.size(), range);
    chunks_->close(c, access);
  }
}

void OptimizerStates::set_initial(const Unit& unit, const at::Tensor& original) {
  UnitStates& mine = at(unit.id);
  const Range kept = kept_range(unit.id);
  const at::Tensor values = original.narrow(0, kept.begin, kept.size());
  if (mine.tier != Tier::kDevice) {
    const at::Tensor on_host = values.to(at::kCPU, at::kFloat).contiguous();
    lane_->run([&] {
      for_chunks(unit.id, Access::kChange, [&](float* master, std::int64_t n, Range range) {
        std::copy_n(on_host.const_data_ptr<float>() + range.begin, n, master);
      });
    });
    return;
  }
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device_);
  if (!mine.master_is_bound) mine.master = values.to(options, false, /*copy=*/true);
  const int moments = OptimizerStates::moments(config_);
  if (moments > 0) mine.first = at::zeros({kept.size()}, options);
  if (moments > 1) mine.second = at::zeros({kept.size()}, options);
  mine.bytes = ledger_->track(MemoryKind::kOptimizer, Tier::kDevice,
                              (moments + (mine.master_is_bound ? 0 : 1)) * kept.size() * 4);
}

void OptimizerStates::move(c10::Device to, Tier tier) {
  for (UnitStates& unit : units_) {
    if (unit.tier != Tier::kDevice || unit.bytes.bytes() == 0) continue;
    for (at::Tensor* state : {&unit.master, &unit.first, &unit.second})
      if (state->defined() && !(unit.master_is_bound && state == &unit.master)) *state = state->to(to);
    unit.bytes = ledger_->track(MemoryKind::kOptimizer, tier, unit.bytes.bytes());
  }
}

const OptimizerHyper& OptimizerStates::hyper(int group) const {
  return group == 0 ? config_.hyper : config_.groups[static_cast<std::size_t>(group - 1)].hyper;
}

// Neighbouring parameters with equal values share a segment, the padding between them included: its gradient and
// moments are zero, and no rule makes anything but zero of that.
OptimizerStates::Update OptimizerStates::prepare(int unit, LandedSum sum, const UpdateStep& step) {
  Update update{unit, std::move(sum), {}, step.lr, step.grad_factor, true};
  std::vector<Segment>& segments = update.segments;
  const Range kept = kept_range(unit);
  for (const Slot& slot : layout_.units[static_cast<std::size_t>(unit)].slots) {
    const auto p = static_cast<std::size_t>(slot.parameter);
    update.all = update.all && step.active[p];
    if (!step.active[p]) continue;
    const std::int64_t count = ++steps_[p];
    const bool fresh = fresh_[p];
    fresh_[p] = false;
    const Range part = intersect(kept, {slot.offset, slot.offset + slot.numel});
    if (part.empty()) continue;
    const Range local{part.begin - kept.begin, part.end - kept.begin};
    const int group = layout_.parameters[p].group;
    const bool follows = !segments.empty() && segments.back().group == group && segments.back().step == count &&
                         segments.back().fresh == fresh && local.begin - segments.back().range.end < kSlotAlign;
    if (follows) {
      segments.back().range.end = local.end;
    } else {
      segments.push_back({local, group, count, fresh});
    }
  }
  return update;
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

int OptimizerStates::array_of(const std::string& key) const {
  if (key.empty()) return 0;
  const std::vector<std::string> known = keys();
  const auto found = std::find(known.begin(), known.end(), key);
  if (found != known.end()) return 1 + static_cast<int>(found - known.begin());
  std::string list = kStepKey;
  for (const std::string& name : known) list += ", " + name;
  throw UseError("optim.state", "this optimizer has no state of that name (", key, "; it has: ", list, ")");
}

at::Tensor OptimizerStates::read(int unit, const std::string& key) {
  const int array = array_of(key);
  UnitStates& mine = at(unit);
  if (mine.tier == Tier::kDevice) return array == 0 ? mine.master : array == 1 ? mine.first : mine.second;
  const at::Tensor values = at::empty({kept_range(unit).size()}, at::kFloat);
  lane_->run([&] {
    for_chunks(unit, Access::kRead, [&](const float* floats, std::int64_t n, Range range) {
      std::copy_n(floats + array * n, n, values.mutable_data_ptr<float>() + range.begin);
    });
  });
  return values;
}

void OptimizerStates::write(int unit, const std::string& key, Range elements, const at::Tensor& values) {
  const int array = array_of(key);
  UnitStates& mine = at(unit);
  if (elements.empty()) return;
  const at::Tensor fp32 = values.to(at::kFloat);
  if (mine.tier == Tier::kDevice) {
    const at::Tensor& state = array == 0 ? mine.master : array == 1 ? mine.first : mine.second;
    state.narrow(0, elements.begin, elements.size()).copy_(fp32);
  } else {
    const at::Tensor on_host = fp32.cpu().contiguous();
    lane_->run([&] {
      const auto put = [&](float* floats, std::int64_t n, Range range) {
        const Range part = intersect(elements, range);
        std::copy_n(on_host.const_data_ptr<float>() + (part.begin - elements.begin), part.size(),
                    floats + array * n + (part.begin - range.begin));
      };
      for_chunks(unit, Access::kChange, put, elements);
    });
  }
}

std::vector<at::Tensor*> OptimizerStates::arrays_of(UnitStates& unit) const {
  std::vector<at::Tensor*> arrays{&unit.master, &unit.first, &unit.second};
  arrays.resize(1 + static_cast<std::size_t>(moments(config_)));
  return arrays;
}

StateRead OptimizerStates::read_all(int unit, Range elements, const at::Tensor& memory) {
  UnitStates& mine = at(unit);
  StateRead read;
  if (mine.tier == Tier::kDevice) {
    read.runs_->push_back({elements, {}});
    for (const at::Tensor* array : arrays_of(mine))
      read.runs_->back().arrays.push_back(array->narrow(0, elements.begin, elements.size()));
    return read;
  }
  const bool copy = mine.tier == Tier::kNvme;  // a buffer of the ring soon has another chunk
  if (copy) {
    read.runs_->push_back({elements, {}});
    for (int array = 0; array < arrays(); ++array)
      read.runs_->back().arrays.push_back(memory.defined() ? memory.narrow(0, array * elements.size(), elements.size())
                                                           : at::empty({elements.size()}, at::kFloat));
  }
  read.lane_ = lane_;
  read.ticket_ = lane_->submit([this, unit, elements, copy, runs = read.runs_] {
    const auto take = [&](float* floats, std::int64_t n, Range range) {
      const Range part = intersect(elements, range);
      if (!copy) runs->push_back({part, {}});
      for (int array = 0; array < arrays(); ++array) {
        float* const values = floats + array * n + (part.begin - range.begin);
        if (copy)
          std::copy_n(values, part.size(),
                      runs->back().arrays[static_cast<std::size_t>(array)].mutable_data_ptr<float>() +
                          (part.begin - elements.begin));
        else
          runs->back().arrays.push_back(at::from_blob(values, {part.size()}, at::kFloat));
      }
    };
    for_chunks(unit, Access::kRead, take, elements);
  });
  return read;
}

std::vector<SpareStates> OptimizerStates::spares(int unit, bool may_last) const {
  const UnitStates& mine = at(unit);
  std::vector<SpareStates> spares;
  if (mine.tier == Tier::kHost && may_last) {  // the chunks of another StateChunks
    for (int c = mine.first_chunk; c < mine.first_chunk + mine.chunks; ++c)
      spares.push_back({cuts_[static_cast<std::size_t>(c)].range, 0, arrays(), true, {}});
    return spares;
  }
  const bool lasts = mine.tier == Tier::kDevice && device_.is_cpu();
  const int apart = mine.tier == Tier::kDevice && mine.master_is_bound ? 1 : 0;  // the parameters stay where they are
  const Range all{0, kept_range(unit).size()};
  if (apart > 0) spares.push_back({all, 0, 1, false, {}});
  if (arrays() > apart) spares.push_back({all, apart, arrays() - apart, lasts, {}});
  return spares;
}

void OptimizerStates::take_over(int unit, const std::vector<SpareStates>& spares, tiers::BounceBuffer& bounce) {
  UnitStates& mine = at(unit);
  if (std::all_of(spares.begin(), spares.end(), [](const SpareStates& spare) { return spare.placed; })) return;
  if (mine.tier == Tier::kDevice) {
    const std::vector<at::Tensor*> arrays = arrays_of(mine);
    for (const SpareStates& spare : spares)
      for (int a = spare.first; a < spare.first + spare.arrays; ++a) {
        at::Tensor& state = *arrays[static_cast<std::size_t>(a)];
        if (spare.lasts)
          state = spare.array(a);
        else
          bounce.write(spare.array(a), state.narrow(0, spare.range.begin, spare.range.size()));
      }
    return;
  }
  lane_->run([&] {
    if (!spares.empty() && spares.front().lasts) {
      for (std::size_t c = 0; c < spares.size(); ++c)
        chunks_->replace(mine.first_chunk + static_cast<int>(c), spares[c].memory);
      return;
    }
    for_chunks(unit, Access::kReplace, [&](float* floats, std::int64_t n, Range range) {
      for (const SpareStates& spare : spares)
        for (int a = spare.first; a < spare.first + spare.arrays; ++a)
          std::copy_n(spare.array(a).const_data_ptr<float>() + (range.begin - spare.range.begin), n, floats + a * n);
    });
  });
}

std::unique_ptr<ChunkRefill> OptimizerStates::make_refill() {
  if (policy_.tier != Tier::kNvme || cuts_.empty()) return nullptr;
  std::unique_ptr<StateChunks> chunks;
  lane_->run([&] {
    try {
      chunks = std::make_unique<StateChunks>(*chunks_, ledger_);
    } catch (const IoError& e) {
      log_info("optim: no room for a second file of states, so new ones wait in memory: ", e.what());
    }
  });
  if (!chunks) return nullptr;
  return std::make_unique<ChunkRefill>(std::move(chunks), static_cast<int>(cuts_.size()), policy_.swap.buffers / 2,
                                       *lane_);
}

void OptimizerStates::run(ChunkRefill& refill, const std::function<void(int, const SpareStates&)>& begin,
                          const std::function<void()>& complete) {
  const auto begin_chunk = [&](int c, float* floats) {
    const auto& [unit, range] = cuts_[static_cast<std::size_t>(c)];
    begin(unit, {range, 0, arrays(), false, at::from_blob(floats, {arrays() * range.size()}, at::kFloat)});
  };
  refill.run(begin_chunk, complete);
}

void OptimizerStates::take_over(ChunkRefill& refill) {
  lane_->run([&] { refill.exchange(chunks_); });
}

}  // namespace ballast
