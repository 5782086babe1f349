// load_checkpoint(): everything is read and checked, the ranks agree, and only then anything changes.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/checkpoint_reader.h"
#include "ballast/engine/generators.h"
#include "ballast/engine/host_threads.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/load_plan.h"
#include "ballast/engine/rank_errors.h"
#include "ballast/engine/rank_likeness.h"
#include "ballast/engine/rank_reader.h"
#include "ballast/tiers/bounce_buffer.h"
#include "ballast/tiers/host_memory.h"

namespace ballast {
namespace {

constexpr std::int64_t kMostCounted = std::int64_t{1} << 53;  // what any program can read from JSON

// Throws IoError.
void check_run(const ckpt::Manifest& manifest, const std::string& where) {
  for (const char* counter : {"global_steps", "applied_steps", "skipped_steps", "micro_steps", "global_samples"})
    if (!manifest.counters.contains(counter) || manifest.counters.at(counter) < 0 ||
        manifest.counters.at(counter) > kMostCounted)
      throw IoError("engine.load_checkpoint", "the checkpoint lacks a counter, or it is out of range (", where, "; ",
                    counter, ")");
  if (manifest.schedule_steps > manifest.counters.at("applied_steps"))
    throw IoError("engine.load_checkpoint", "the schedule is older than the run (", where, ")");
  if (!(manifest.loss_scale > 0 && manifest.loss_scale <= std::numeric_limits<float>::max()))
    throw IoError("engine.load_checkpoint", "not a loss scale (", where, "; ", manifest.loss_scale, ")");
  if (manifest.window && !(std::isfinite(manifest.window->weight) && manifest.window->weight >= 0))
    throw IoError("engine.load_checkpoint", "not the weight of a window (", where, "; ", manifest.window->weight, ")");
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
  const at::NoGradGuard no_grad;
  const Agreed agreed = engine.begin_checkpoint_call();
  engine.final_on_error([&] {
    check_same_request(*engine.rounds, "engine.load_checkpoint", "give all ranks the same tag and options",
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
    report.tag = reader->path().filename().string();  // which may have been renamed since
    if (!manifest.client_state.is_null()) report.client_state = manifest.client_state.dump();
    check_run(manifest, reader->path().string());
    plan = match(layout, own_buffers, manifest, report);
    if (options.strict) refuse_misfit(report, reader->path().string());
    if (options.strict && with_optimizer) refuse_other_optimizer(manifest, optimizer->keys(), reader->path().string());
  });
  final_on_error([&] {
    check_same_request(*rounds, "engine.load_checkpoint", "all ranks must see the same folder", reader->digest());
  });
  const ckpt::Manifest& manifest = reader->manifest();
  const bool same_ranks = manifest.world == world.size();
  report.window = manifest.window && !options.weights_only;

  const int ranks_here = final_on_error([&] { return ranks_on_this_machine(*rounds); });
  RankReader mine(*reader, plan, *optimizer, *params, with_optimizer);
  Staged staged;
  together(*rounds, [&] {
    mine.prepare(layout);
    staged.keep = mine.bytes(layout) < tiers::available_host_bytes() / (2 * ranks_here);
    if (staged.keep) mine.reserve(layout);
    mine.refill(layout, staged.keep);
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
    tiers::BounceBuffer bounce(world.device(), policies.optimizer.pin_memory);
    reducer->come_level(announce(false));
    drop_window();
    mine.place_refill();
    for (const Unit& unit : layout.units) {
      const auto u = static_cast<std::size_t>(unit.id);
      if (!staged.keep) {
        staged.units[u] = mine.read(unit);
        mine.complete();
      }
      take_up_unit(unit, plan, std::exchange(staged.units[u], {}), with_optimizer, bounce);
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
      // A weight counts as it is; else the sum over the ranks stands for a mean over them. And sums hold the loss scale
      // of the engine that made them.
      const bool weighted = manifest.window->scaling == "weighted";
      const double ranks = weighted ? 1 : static_cast<double>(world.size()) / manifest.world;
      grads->overwrite(static_cast<int>(p), sum.to(world.device()).mul_(ranks * scaler.scale() / manifest.loss_scale));
    }
  });
  return report;
}

void Engine::Impl::take_up_unit(const Unit& unit, const LoadPlan& plan, const std::vector<SpareStates>& values,
                                bool with_optimizer, tiers::BounceBuffer& bounce) {
  if (values.empty()) return;
  const std::vector<std::string> keys = optimizer->keys();
  std::vector<bool> written(layout.parameters.size(), false);
  for (const Slot& slot : unit.slots) {
    const auto p = static_cast<std::size_t>(slot.parameter);
    const ckpt::ParameterRecord* record = plan.parameters[p];
    written[p] = record != nullptr;
    if (record == nullptr || !unit.trainable || !with_optimizer) continue;
    const bool goes_on = record->trainable && has_states(*record, keys);
    optimizer->set_steps(slot.parameter, goes_on ? record->steps : 0);
    optimizer->set_fresh(slot.parameter, goes_on ? record->fresh : true);
  }
  const at::DisableRecordFunctionGuard unobserved;  // an observer would take this for somebody else's write
  params->before_write(unit.id);
  if (!unit.trainable || optimizer->masters_apart(unit.id))
    params->with_owned(unit.id, ShardHome::Access::kReplace, [&](const at::Tensor& owned) {
      for (const SpareStates& part : values)
        if (part.first == 0) bounce.write(part.array(0), owned.narrow(0, part.range.begin, part.range.size()));
    });
  if (unit.trainable) optimizer->take_over(unit.id, values, bounce);
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
                ", now: ", describe_scheduler(), "; LoadOptions::load_scheduler = false begins it anew)");
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
