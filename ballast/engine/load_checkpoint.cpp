// load_checkpoint(): everything is read and checked, the ranks agree, and only then anything changes.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "ballast/engine/generators.h"
#include "ballast/engine/host_threads.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/load_plan.h"
#include "ballast/engine/rank_errors.h"
#include "ballast/engine/rank_likeness.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/host_memory.h"

namespace ballast {
namespace {

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()),
          static_cast<std::size_t>(tensor.numel()) * tensor.element_size()};
}

/// What a rank keeps of a unit, on the host: the optimizer's states, or a frozen unit's parameters, in their dtype, as
/// if they were master weights.
using UnitValues = std::vector<SpareStates>;

/// Reads what this rank keeps out of a checkpoint. What is returned has its values when complete() returns.
class RankReader {
 public:
  RankReader(ckpt::CheckpointReader& reader, const LoadPlan& plan, OptimizerStates& optimizer, ParamStore& params,
             bool with_optimizer)
      : reader_(reader), plan_(plan), optimizer_(optimizer), params_(params), with_optimizer_(with_optimizer) {}

  /// Bytes of what read() returns for all units.
  std::int64_t bytes(const Layout& layout) const {
    const auto [lasting, passing] = bytes_by_life(layout);
    return lasting + passing;
  }
  /// Gets memory for that in advance, in huge pages: small ones would take as long to get as the data. What outlives
  /// the load lies apart from what doesn't.
  void reserve(const Layout& layout) {
    may_last_ = std::all_of(layout.units.begin(), layout.units.end(),
                            [&](const Unit& unit) { return !unit.trainable || has_any_of(unit); });
    const auto [lasting, passing] = bytes_by_life(layout);
    lasting_.emplace(lasting, false, c10::kCPU);
    passing_.emplace(passing, false, c10::kCPU);
  }

  /// What the checkpoint hasn't is as it is now. Empty where it has nothing of the unit.
  UnitValues read(const Unit& unit) {
    if (!has_any_of(unit)) return {};
    UnitValues values = shape_of(unit);
    for (SpareStates& part : values) {
      const c10::ScalarType dtype = unit.trainable ? at::kFloat : unit.compute_dtype;
      std::optional<tiers::HostArena>& arena = part.lasts ? lasting_ : passing_;
      part.memory = arena ? arena->allocate(part.numel(), dtype) : at::empty({part.numel()}, dtype);
      if (unit.trainable && covers(unit))
        clear_padding(unit, part);
      else
        copy_current(unit, part);
      for_pieces(unit, part, [&](const ckpt::ParameterRecord& record, Range elements, std::int64_t at) {
        for (int a = part.first; a < part.first + part.arrays; ++a)
          read_state(record, a, elements, part.array(a).narrow(0, at, elements.size()));
      });
    }
    return values;
  }

  at::Tensor read_whole(const ckpt::Pieces& pieces, c10::ScalarType dtype, at::IntArrayRef shape) {
    at::Tensor values = at::empty(shape, dtype);
    read(pieces, dtype, {0, values.numel()}, values);
    return values;
  }

  void complete() {
    reader_.complete();
    for (auto& [stored, to] : std::exchange(later_, {}))
      if (stored.scalar_type() != to.scalar_type()) to.copy_(stored);
  }

 private:
  const ckpt::ParameterRecord* record_of(const Slot& slot) const {
    return plan_.parameters[static_cast<std::size_t>(slot.parameter)];
  }
  bool has_any_of(const Unit& unit) const {
    return std::any_of(unit.slots.begin(), unit.slots.end(),
                       [&](const Slot& slot) { return record_of(slot) != nullptr; });
  }
  bool covers(const Unit& unit) const {
    return with_optimizer_ && std::all_of(unit.slots.begin(), unit.slots.end(), [&](const Slot& slot) {
             const ckpt::ParameterRecord* record = record_of(slot);
             if (record == nullptr) return false;
             for (const std::string& key : keys_)
               if (!record->states.contains(key)) return false;
             return true;
           });
  }

  Range kept(const Unit& unit) const {
    return unit.trainable ? optimizer_.kept_range(unit.id) : params_.owned_range(unit.id);
  }
  UnitValues shape_of(const Unit& unit) const {
    if (unit.trainable) return optimizer_.spares(unit.id, may_last_);
    return {{{0, kept(unit).size()}, 0, 1, false, {}}};
  }
  std::pair<std::int64_t, std::int64_t> bytes_by_life(const Layout& layout) const {
    std::int64_t bytes[2] = {};
    for (const Unit& unit : layout.units)
      for (const SpareStates& part : shape_of(unit))
        bytes[part.lasts] += tiers::HostArena::bytes_of(part.numel(), unit.trainable ? at::kFloat : unit.compute_dtype);
    return {bytes[true], bytes[false]};
  }

  void copy_current(const Unit& unit, const SpareStates& part) {
    if (!unit.trainable) {
      params_.with_owned(unit.id, ShardHome::Access::kRead, [&](const at::Tensor& now) { part.memory.copy_(now); });
      return;
    }
    for (const StateRun& now : optimizer_.read_all(unit.id, part.range))
      for (int a = part.first; a < part.first + part.arrays; ++a)
        part.array(a)
            .narrow(0, now.range.begin - part.range.begin, now.range.size())
            .copy_(now.arrays[static_cast<std::size_t>(a)]);
  }

  // What lies between the parameters.
  void clear_padding(const Unit& unit, const SpareStates& part) const {
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

  // fn(record, elements of the parameter, where in the part they lie)
  template <class Fn>
  void for_pieces(const Unit& unit, const SpareStates& part, Fn&& fn) const {
    const Range range = in_unit(unit, part);
    for (const Slot& slot : unit.slots) {
      const Range piece = intersect(range, {slot.offset, slot.offset + slot.numel});
      if (record_of(slot) != nullptr && !piece.empty())
        fn(*record_of(slot), Range{piece.begin - slot.offset, piece.end - slot.offset}, piece.begin - range.begin);
    }
  }
  Range in_unit(const Unit& unit, const SpareStates& part) const {
    const std::int64_t begin = kept(unit).begin;
    return {begin + part.range.begin, begin + part.range.end};
  }

  void read_state(const ckpt::ParameterRecord& record, int array, Range elements, const at::Tensor& to) {
    if (array == 0) return read_weights(record, elements, to);
    const auto pieces = record.states.find(keys_[static_cast<std::size_t>(array - 1)]);
    if (with_optimizer_ && pieces != record.states.end()) read(pieces->second, at::kFloat, elements, to);
  }
  // Weights are fp32 masters where the parameter was trainable, else what forward saw.
  void read_weights(const ckpt::ParameterRecord& record, Range elements, const at::Tensor& to) {
    const auto masters = record.states.find(kMasterKey);
    if (masters != record.states.end()) return read(masters->second, at::kFloat, elements, to);
    read(record.states.at(kParamKey), record.dtype, elements, to);
  }
  void read(const ckpt::Pieces& pieces, c10::ScalarType dtype, Range elements, const at::Tensor& to) {
    const at::Tensor stored = to.scalar_type() == dtype ? to : at::empty({elements.size()}, dtype);
    reader_.read_later(pieces, dtype, elements.begin, elements.end, bytes_of(stored));
    later_.emplace_back(stored, to);
  }

  ckpt::CheckpointReader& reader_;
  const LoadPlan& plan_;
  OptimizerStates& optimizer_;
  ParamStore& params_;
  const bool with_optimizer_;
  const std::vector<std::string> keys_ = optimizer_.keys();
  std::vector<std::pair<at::Tensor, at::Tensor>> later_;  // what is being read, and where it goes in another type
  bool may_last_ = false;
  std::optional<tiers::HostArena> lasting_, passing_;
};

// Throws IoError.
void check_run(const ckpt::Manifest& manifest, const std::string& where) {
  for (const char* counter : {"global_steps", "applied_steps", "skipped_steps", "micro_steps", "global_samples"})
    if (!manifest.counters.contains(counter) || manifest.counters.at(counter) < 0)
      throw IoError("engine.load_checkpoint", "the checkpoint lacks a counter (", where, "; ", counter, ")");
  if (manifest.schedule_steps > manifest.counters.at("applied_steps"))
    throw IoError("engine.load_checkpoint", "the schedule is older than the run (", where, ")");
  if (!(std::isfinite(manifest.loss_scale) && manifest.loss_scale > 0))
    throw IoError("engine.load_checkpoint", "not a loss scale (", where, "; ", manifest.loss_scale, ")");
  for (const double rate : manifest.lr)
    if (!(std::isfinite(rate) && rate >= 0))
      throw IoError("engine.load_checkpoint", "not a learning rate (", where, "; ", rate, ")");
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text.empty() ? "none" : text;
}

void refuse_other_optimizer(const ckpt::Manifest& manifest, const std::vector<std::string>& keys,
                            const std::string& where) {
  if (manifest.keys != keys)
    throw UseError("engine.load_checkpoint", "the checkpoint's optimizer keeps other states (", where, "; ",
                   manifest.optimizer, ": ", join(manifest.keys), "; here: ", join(keys),
                   "; LoadOptions::load_optimizer = false starts it afresh)");
}

/// What is read before anything changes, where this rank's memory has room for it; else it is read twice.
struct Staged {
  bool keep = false;
  std::vector<UnitValues> units;
  std::vector<at::Tensor> buffers;
  NamedTensors generators;
};

}  // namespace

LoadReport Engine::load_checkpoint(const std::filesystem::path& folder, const std::string& tag,
                                   const LoadOptions& options) {
  Impl& engine = running();
  engine.check_usable();
  const at::NoGradGuard no_grad;
  const Agreed agreed = engine.final_on_error([&] { return engine.meet(Call::kCheckpoint, 0); });
  engine.finish_save();
  engine.final_on_error([&] {
    check_same_request(*engine.rounds, "engine.load_checkpoint",
                       tag + "|" + std::to_string(options.weights_only) + std::to_string(options.load_optimizer) +
                           std::to_string(options.load_scheduler) + std::to_string(options.strict));
  });
  return engine.load(folder, tag, options, agreed.most_backwards);
}

LoadReport Engine::Impl::load(const std::filesystem::path& folder, const std::string& tag, const LoadOptions& options,
                              std::int64_t pending) {
  const bool with_optimizer = options.load_optimizer && !options.weights_only;
  std::unique_ptr<ckpt::CheckpointReader> reader;
  LoadReport report;
  LoadPlan plan;
  const NamedTensors own_buffers = buffers();
  together(*rounds, [&] {
    reader = std::make_unique<ckpt::CheckpointReader>(ckpt::CheckpointFolder(folder, {world.rank()}), tag,
                                                      ckpt::Owner{world.rank()});
    const ckpt::Manifest& manifest = reader->manifest();
    report.tag = manifest.tag;
    if (!manifest.client_state.is_null()) report.client_state = manifest.client_state.dump();
    check_run(manifest, reader->path().string());
    plan = match(layout, own_buffers, manifest, report);
    if (options.strict) refuse_misfit(report, reader->path().string());
    if (options.strict && with_optimizer) refuse_other_optimizer(manifest, optimizer->keys(), reader->path().string());
  });
  final_on_error([&] { check_same_request(*rounds, "engine.load_checkpoint", reader->digest()); });
  const ckpt::Manifest& manifest = reader->manifest();
  const bool same_ranks = manifest.world == world.size();
  report.window = manifest.window && !options.weights_only;

  const int ranks_here = final_on_error([&] { return ranks_on_this_machine(*rounds); });
  RankReader mine(*reader, plan, *optimizer, *params, with_optimizer);
  Staged staged;
  together(*rounds, [&] {
    staged.keep = mine.bytes(layout) < tiers::available_host_bytes() / (2 * ranks_here);
    if (staged.keep) mine.reserve(layout);
    for (const Unit& unit : layout.units) {
      UnitValues values = mine.read(unit);
      if (!staged.keep) mine.complete();
      staged.units.push_back(staged.keep ? std::move(values) : UnitValues());
    }
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const ckpt::BufferRecord* record = plan.buffers[b];
      staged.buffers.push_back(record ? mine.read_whole(record->pieces, record->dtype, record->shape) : at::Tensor());
    }
    const auto check = [&mine](const ckpt::Pieces& pieces, const std::vector<std::int64_t>& shape) {
      const at::Tensor dropped = mine.read_whole(pieces, at::kFloat, shape);
      mine.complete();
    };
    if (report.window)
      for (const ckpt::ParameterRecord* record : plan.parameters)
        if (record && record->states.contains(kGradientKey)) check(record->states.at(kGradientKey), record->shape);
    if (same_ranks && !options.weights_only && static_cast<int>(manifest.rng.size()) == world.size())
      for (const auto& [name, piece] : manifest.rng[static_cast<std::size_t>(world.rank())])
        staged.generators.emplace_back(name, mine.read_whole({piece}, at::kByte, {piece.end - piece.begin}));
    mine.complete();
  });

  if (pending > 0 && world.rank() == 0)
    log_info("load_checkpoint drops a window of ", pending, pending == 1 ? " backward" : " backwards");
  final_on_error([&] {
    reducer->come_level(announce(false));
    drop_window();
    for (const Unit& unit : layout.units) {
      const auto u = static_cast<std::size_t>(unit.id);
      if (!staged.keep) {
        staged.units[u] = mine.read(unit);
        mine.complete();
      }
      take_up_unit(unit, plan, std::exchange(staged.units[u], {}), with_optimizer);
    }
    for (std::size_t b = 0; b < own_buffers.size(); ++b)
      if (staged.buffers[b].defined()) own_buffers[b].second.copy_(staged.buffers[b]);
    if (options.weights_only) return;
    restore_generators(world.device(), staged.generators);
    take_up_run(manifest, options);
    if (!report.window) return;
    take_up_window(*manifest.window, manifest.world);
    for (std::size_t p = 0; p < plan.parameters.size(); ++p) {
      const ckpt::ParameterRecord* record = plan.parameters[p];
      if (record == nullptr || !record->states.contains(kGradientKey) || !layout.parameters[p].trainable) continue;
      const at::Tensor sum = mine.read_whole(record->states.at(kGradientKey), at::kFloat, record->shape);
      mine.complete();
      // A weight counts as it is; else the sum over the ranks stands for a mean over them.
      const bool weighted = manifest.window->scaling == "weighted";
      const double ranks = weighted ? 1 : static_cast<double>(world.size()) / manifest.world;
      grads->overwrite(static_cast<int>(p), sum.to(world.device()).mul_(ranks));
    }
  });
  return report;
}

void Engine::Impl::take_up_unit(const Unit& unit, const LoadPlan& plan, const std::vector<SpareStates>& values,
                                bool with_optimizer) {
  if (values.empty()) return;
  std::vector<bool> written(layout.parameters.size(), false);
  for (const Slot& slot : unit.slots) {
    const auto p = static_cast<std::size_t>(slot.parameter);
    const ckpt::ParameterRecord* record = plan.parameters[p];
    written[p] = record != nullptr;
    if (record == nullptr || !unit.trainable || !with_optimizer) continue;
    optimizer->set_steps(slot.parameter, record->trainable ? record->steps : 0);
    optimizer->set_fresh(slot.parameter, record->trainable ? record->fresh : true);
  }
  const at::DisableRecordFunctionGuard unobserved;  // an observer would take this for somebody else's write
  if (!unit.trainable || optimizer->masters_apart(unit.id))
    params->with_owned(unit.id, ShardHome::Access::kReplace, [&](const at::Tensor& owned) {
      for (const SpareStates& part : values)
        if (part.first == 0) owned.narrow(0, part.range.begin, part.range.size()).copy_(part.array(0));
    });
  if (unit.trainable) optimizer->take_over(unit.id, values);
  params->publish(unit.id, written);
  params->finish_publish();
}

void Engine::Impl::take_up_run(const ckpt::Manifest& manifest, const LoadOptions& options) {
  if (!manifest.run.empty()) run = manifest.run;
  counters = {manifest.counters.at("global_steps"), manifest.counters.at("applied_steps"),
              manifest.counters.at("skipped_steps"), manifest.counters.at("micro_steps"),
              manifest.counters.at("global_samples")};
  const auto& state = manifest.loss_scaler;
  if (options.load_optimizer && state.contains("steps") && state.contains("last_overflow") && state.contains("lives"))
    scaler.restore({manifest.loss_scale, state.at("steps"), state.at("last_overflow"),
                    static_cast<int>(std::clamp<std::int64_t>(state.at("lives"), 1, 1 << 30))});
  schedule_begin = counters.applied_steps - (options.load_scheduler ? manifest.schedule_steps : 0);
  // What set_lr() gave goes on too, where the schedule is the same one.
  const bool same =
      options.load_scheduler && manifest.scheduler == describe_scheduler() && manifest.lr.size() == lr.size();
  lr = same ? manifest.lr : schedule.lr(counters.applied_steps - schedule_begin);
  if (options.load_scheduler && manifest.scheduler != describe_scheduler() && world.rank() == 0)
    log_warning("the checkpoint was saved with another schedule; this one goes on at its step ",
                counters.applied_steps - schedule_begin, " (saved: ", manifest.scheduler,
                ", now: ", describe_scheduler(), "; with load_scheduler = false it begins anew)");
}

void Engine::Impl::take_up_window(const ckpt::WindowRecord& record, int saved_world) {
  const auto scaling = record.scaling == "weighted" ? Window::Scaling::kWeighted
                       : record.scaling == "sum"    ? Window::Scaling::kSum
                                                    : Window::Scaling::kMean;
  const bool counts = window.managed() && !record.managed;
  window.restore(scaling, world.rank() == 0 ? record.weight : 0, record.backwards, record.since_step,
                 counts ? record.backwards : record.micro_batches);
  rounds->counts() = {window.number(), window.backwards(), window.micro_batches()};
  if (saved_world != world.size() && world.rank() == 0)
    log_info("a window that ", saved_world, " ranks began goes on with ", world.size());
}

}  // namespace ballast
