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

/// Reads what this rank keeps out of a checkpoint. What is returned has its values when complete() returns.
class RankReader {
 public:
  RankReader(ckpt::CheckpointReader& reader, const LoadPlan& plan, OptimizerStates& optimizer, ParamStore& params,
             bool with_optimizer)
      : reader_(reader), plan_(plan), optimizer_(optimizer), params_(params), with_optimizer_(with_optimizer) {}

  /// Gets memory for what follows, bytes(), in huge pages: small ones would take as long to get as the data.
  void reserve(std::int64_t bytes) { arena_.emplace(bytes, false, c10::kCPU); }
  /// Of all units.
  std::int64_t bytes(const Layout& layout) const {
    std::int64_t bytes = 0;
    for (const Unit& unit : layout.units)
      bytes += unit.trainable ? (1 + static_cast<std::int64_t>(optimizer_.keys().size())) *
                                    tiers::HostArena::bytes_of(optimizer_.kept_range(unit.id).size(), at::kFloat)
                              : tiers::HostArena::bytes_of(params_.owned_range(unit.id).size(), unit.compute_dtype);
    return bytes;
  }

  /// What is kept of the unit, on the host: master weights and moments, or a frozen unit's parameters. What the
  /// checkpoint hasn't is as it is now. Empty where it has nothing of the unit.
  std::vector<at::Tensor> read(const Unit& unit) {
    const bool any =
        std::any_of(unit.slots.begin(), unit.slots.end(), [&](const Slot& slot) { return record_of(slot) != nullptr; });
    if (!any) return {};
    return unit.trainable ? read_states(unit) : read_frozen(unit);
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

  void read(const ckpt::Pieces& pieces, c10::ScalarType dtype, Range elements, const at::Tensor& to) {
    const at::Tensor stored = to.scalar_type() == dtype ? to : at::empty({elements.size()}, dtype);
    reader_.read_later(pieces, dtype, elements.begin, elements.end, bytes_of(stored));
    later_.emplace_back(stored, to);
  }
  // Weights are fp32 masters where the parameter was trainable, else what forward saw.
  void read_weights(const ckpt::ParameterRecord& record, Range elements, const at::Tensor& to) {
    const auto masters = record.states.find(kMasterKey);
    if (masters != record.states.end()) return read(masters->second, at::kFloat, elements, to);
    read(record.states.at(kParamKey), record.dtype, elements, to);
  }

  bool covers(const Unit& unit) const {
    return with_optimizer_ && std::all_of(unit.slots.begin(), unit.slots.end(), [&](const Slot& slot) {
             const ckpt::ParameterRecord* record = record_of(slot);
             if (record == nullptr) return false;
             for (const std::string& key : optimizer_.keys())
               if (!record->states.contains(key)) return false;
             return true;
           });
  }

  template <class Fn>
  void for_parts(const Unit& unit, Range kept, Fn&& fn) {
    for (const Slot& slot : unit.slots) {
      const Range part = intersect(kept, {slot.offset, slot.offset + slot.numel});
      if (record_of(slot) != nullptr && !part.empty())
        fn(*record_of(slot), Range{part.begin - slot.offset, part.end - slot.offset}, part.begin - kept.begin,
           part.size());
    }
  }

  at::Tensor memory(std::int64_t elements, c10::ScalarType dtype) {
    return arena_ ? arena_->allocate(elements, dtype) : at::empty({elements}, dtype);
  }

  // Undefined but between the parameters.
  at::Tensor zero_padded(const Unit& unit, Range kept) {
    const at::Tensor array = memory(kept.size(), at::kFloat);
    std::int64_t end = kept.begin;
    const auto zero_until = [&](std::int64_t begin) {
      const Range gap = intersect(kept, {end, begin});
      if (!gap.empty()) array.narrow(0, gap.begin - kept.begin, gap.size()).zero_();
    };
    for (const Slot& slot : unit.slots) {
      zero_until(slot.offset);
      end = slot.offset + slot.numel;
    }
    zero_until(kept.end);
    return array;
  }

  std::vector<at::Tensor> read_states(const Unit& unit) {
    const Range kept = optimizer_.kept_range(unit.id);
    const std::vector<std::string> keys = optimizer_.keys();
    std::vector<at::Tensor> arrays;
    if (covers(unit)) {
      for (std::size_t i = 0; i <= keys.size(); ++i) arrays.push_back(zero_padded(unit, kept));
    } else {
      for (const at::Tensor& now : optimizer_.read_all(unit.id, {0, kept.size()}))
        arrays.push_back(memory(now.numel(), at::kFloat).copy_(now));
    }
    // Key by key, as they lie in the files.
    for_parts(unit, kept, [&](const ckpt::ParameterRecord& record, Range elements, std::int64_t at, std::int64_t n) {
      read_weights(record, elements, arrays[0].narrow(0, at, n));
    });
    for (std::size_t k = 0; with_optimizer_ && k < keys.size(); ++k)
      for_parts(unit, kept, [&](const ckpt::ParameterRecord& record, Range elements, std::int64_t at, std::int64_t n) {
        if (const auto pieces = record.states.find(keys[k]); pieces != record.states.end())
          read(pieces->second, at::kFloat, elements, arrays[1 + k].narrow(0, at, n));
      });
    return arrays;
  }

  std::vector<at::Tensor> read_frozen(const Unit& unit) {
    const at::Tensor values = memory(params_.owned_range(unit.id).size(), unit.compute_dtype);
    params_.with_owned(unit.id, ShardHome::Access::kRead, [&](const at::Tensor& owned) { values.copy_(owned); });
    for_parts(unit, params_.owned_range(unit.id),
              [&](const ckpt::ParameterRecord& record, Range elements, std::int64_t at, std::int64_t n) {
                read_weights(record, elements, values.narrow(0, at, n));
              });
    return {values};
  }

  ckpt::CheckpointReader& reader_;
  const LoadPlan& plan_;
  OptimizerStates& optimizer_;
  ParamStore& params_;
  const bool with_optimizer_;
  std::vector<std::pair<at::Tensor, at::Tensor>> later_;  // what is being read, and where it goes in another type
  std::optional<tiers::HostArena> arena_;
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
  std::vector<std::vector<at::Tensor>> units;
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
    const std::int64_t bytes = mine.bytes(layout);
    staged.keep = bytes < tiers::available_host_bytes() / (2 * ranks_here);
    if (staged.keep) mine.reserve(bytes);
    for (const Unit& unit : layout.units) {
      std::vector<at::Tensor> values = mine.read(unit);
      if (!staged.keep) mine.complete();
      staged.units.push_back(staged.keep ? std::move(values) : std::vector<at::Tensor>());
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

void Engine::Impl::take_up_unit(const Unit& unit, const LoadPlan& plan, std::vector<at::Tensor> values,
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
  if (unit.trainable) optimizer->write_all(unit.id, values);
  if (!unit.trainable || optimizer->masters_apart(unit.id))
    params->with_owned(unit.id, ShardHome::Access::kReplace,
                       [&](const at::Tensor& owned) { owned.copy_(values.front()); });
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
