// save_checkpoint(): what is saved, by whom, and how the ranks agree that it is.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/checkpoint/bounded_json.h"
#include "ballast/engine/generators.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/module_walk.h"
#include "ballast/engine/rank_errors.h"
#include "ballast/engine/rank_likeness.h"
#include "ballast/engine/states_in_turn.h"
#include "ballast/tiers/device_stream.h"

namespace ballast {
namespace {

constexpr int kDepthOfClientState = 60;  // a manifest around it is a little deeper

void check_request(const std::filesystem::path& folder, const std::string& tag, const SaveOptions& options,
                   bool broken_window) {
  if (!options.refusal.empty()) throw UseError("engine.save_checkpoint", options.refusal);
  if (folder.empty()) throw UseError("engine.save_checkpoint", "the folder has no name (\".\" is the working folder)");
  constexpr const char* kBlanks = " \t\r\n";
  if (!ckpt::is_plain_name(tag) || tag == "latest" || tag.find_last_not_of(kBlanks) + 1 != tag.size())
    throw UseError(
        "engine.save_checkpoint", "not a tag (\"", tag,
        "\"; it names a folder: no path, not hidden, not \"latest\", no blank at its end, at most 200 bytes)");
  if (options.keep_last < 0)
    throw UseError("engine.save_checkpoint", "keep_last is negative (", options.keep_last, "; 0 keeps all)");
  try {
    if (!options.client_state.empty()) ckpt::parse_bounded(options.client_state, kDepthOfClientState, "client_state");
  } catch (const IoError& e) {
    throw UseError("engine.save_checkpoint", "client_state is no JSON document that can be read again (", e.what(),
                   ")");
  }
  if (options.include_window && broken_window)
    throw UseError("engine.save_checkpoint",
                   "an exception left a backward of this window half done (call zero_grad(), or leave include_window)");
}

// Keeps the first error; what follows it is not run, but for what the other ranks wait for.
class Guarded {
 public:
  template <class Fn>
  void operator()(Fn&& fn) {
    if (!error_) always(fn);
  }
  template <class Fn>
  void always(Fn&& fn) {
    try {
      fn();
    } catch (const CommError&) {
      throw;
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

const char* name_of(Window::Scaling scaling) {
  return scaling == Window::Scaling::kWeighted ? "weighted" : scaling == Window::Scaling::kSum ? "sum" : "mean";
}

}  // namespace

NamedTensors Engine::Impl::buffers() const {
  NamedTensors all;
  if (given_buffers) {
    all = given_buffers();
  } else {
    for (const auto& item : module->named_buffers())
      if (item.value().defined()) all.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module->named_parameters())  // frozen ones that the engine leaves as they are
    if (item.value().defined() && !is_sharded_type(item.value().scalar_type()))
      all.emplace_back(item.key(), item.value());
  return all;
}

std::string Engine::Impl::describe_scheduler() const { return config.to_json()["scheduler"].dump(); }

// Collective.
ckpt::WindowRecord Engine::Impl::describe_window() {
  ckpt::WindowRecord record;
  record.managed = window.managed();
  record.micro_batches = window.micro_batches();
  auto scaling = Window::Scaling::kUnset;
  for (const auto& of_rank : rounds->exchange({window.weight(), static_cast<double>(window.scaling()),
                                               static_cast<double>(window.backwards()),
                                               static_cast<double>(window.backwards_since_step())})) {
    record.weight += of_rank[0];
    scaling = std::max(scaling, static_cast<Window::Scaling>(static_cast<int>(of_rank[1])));
    record.backwards = std::max(record.backwards, static_cast<std::int64_t>(of_rank[2]));
    record.since_step = std::max(record.since_step, static_cast<std::int64_t>(of_rank[3]));
  }
  record.scaling = name_of(scaling);
  return record;
}

ckpt::Manifest Engine::Impl::describe_run(const std::string& tag, const SaveOptions& options) const {
  ckpt::Manifest manifest;
  manifest.tag = tag;
  manifest.run = run;
  manifest.world = world.size();
  manifest.stage = config.zero.stage;
  manifest.compute_dtype = config.bf16 ? "bf16" : config.fp16.enabled ? "fp16" : "fp32";
  manifest.optimizer = config.to_json()["optimizer"]["type"];
  manifest.keys = optimizer->keys();
  manifest.counters = {{"global_steps", counters.global_steps},
                       {"applied_steps", counters.applied_steps},
                       {"skipped_steps", counters.skipped_steps},
                       {"micro_steps", counters.micro_steps},
                       {"global_samples", counters.global_samples}};
  const LossScaler::State& state = scaler.state();
  manifest.loss_scale = state.scale;
  if (config.fp16.enabled)
    manifest.loss_scaler = {{"steps", state.steps}, {"last_overflow", state.last_overflow}, {"lives", state.lives}};
  manifest.scheduler = describe_scheduler();
  manifest.schedule_steps = counters.applied_steps - schedule_begin;
  manifest.lr = lr;
  if (!options.client_state.empty()) manifest.client_state = nlohmann::json::parse(options.client_state);
  return manifest;
}

// This rank's tensors, in the order of its file. Collective where a window is kept: then every rank gets to the end,
// whatever becomes of its own data.
void Engine::Impl::produce(const SavePlan& plan, bool with_gradients, const SaveJob::Sink& sink) {
  Guarded guarded;
  const int rank = world.rank();
  // The key behind them is that of the gradient.
  const auto states_of = [&](const Unit& unit) { return unit.trainable ? 1 + optimizer->keys().size() : 1; };
  StatesInTurn states(*optimizer, policies.optimizer.tier);
  for (const Unit& unit : layout.units)
    for (const SavedPart& part : plan.parts(unit, rank))
      if (unit.trainable) states.add(unit.id, part.flat);
  for (const Unit& unit : layout.units) {
    const Range shard = unit.shard_of(rank);
    at::Tensor frozen, sum;  // [shard]
    guarded([&] {
      if (unit.trainable) return;
      params->with_owned(unit.id, ShardHome::Access::kRead, [&](const at::Tensor& owned) {
        frozen = owned.narrow(0, shard.begin - params->owned_range(unit.id).begin, shard.size())
                     .to(at::kCPU, unit.compute_dtype, false, /*copy=*/true);
      });
    });
    if (with_gradients && unit.trainable) {
      guarded.always([&] { sum = reducer->peek(unit.id); });
      if (sum.defined() && policies.grads.keep_whole_sum) sum = sum.narrow(0, shard.begin, shard.size());
    }
    for (const SavedPart& part : plan.parts(unit, rank))
      guarded([&] {
        std::vector<StateRun> runs;
        if (unit.trainable)
          runs = states.take();
        else
          runs = {{shard, {frozen}}};
        for (const SavedPiece& piece : part.pieces) {
          if (piece.key == states_of(unit)) {
            sink(sum.narrow(0, piece.flat.begin - shard.begin, piece.flat.size()));
            continue;
          }
          for (const StateRun& run : runs) {
            const Range some = intersect(piece.flat, run.range);
            if (!some.empty()) sink(run.arrays[piece.key].narrow(0, some.begin - run.range.begin, some.size()));
          }
        }
      });
  }
  guarded([&] {
    if (rank == 0)
      for (const auto& [name, value] : plan.buffers()) sink(value);
    for (const auto& [name, value] : plan.generators()) sink(value);
  });
  guarded.rethrow();
}

Agreed Engine::Impl::begin_checkpoint_call() {
  check_usable();
  refuse_in_backward("engine.checkpoint");
  const Agreed agreed = final_on_error([&] { return meet(Call::kCheckpoint, 0); });
  finish_save();
  return agreed;
}

void Engine::save_checkpoint(const std::filesystem::path& folder, const std::string& tag_in,
                             const SaveOptions& options) {
  Impl& engine = running();
  const at::NoGradGuard no_grad;
  const Agreed agreed = engine.begin_checkpoint_call();
  engine.final_on_error([&] {
    std::vector<int> units;
    for (const Unit& unit : engine.layout.units) units.push_back(unit.id);
    engine.refuse_lost_writes_anywhere(units);
  });
  const std::string tag = tag_in.empty() ? "global_step" + std::to_string(engine.counters.global_steps) : tag_in;
  together(*engine.rounds, [&] { check_request(folder, tag, options, engine.window.broken()); });
  engine.final_on_error([&] {
    check_same_request(*engine.rounds, "engine.save_checkpoint", "give all ranks the same tag and options",
                       tag + "|" + std::to_string(options.include_window) + std::to_string(options.asynchronous) +
                           std::to_string(options.keep_last));
  });
  // An asynchronous save may outlast the working folder.
  engine.save(std::filesystem::absolute(folder), tag, options, agreed);
}

void Engine::Impl::save(const std::filesystem::path& folder, const std::string& tag, const SaveOptions& options,
                        const Agreed& agreed) {
  const bool pending =
      agreed.most_backwards > 0 || std::find(agreed.active.begin(), agreed.active.end(), true) != agreed.active.end();
  const bool with_gradients = pending && options.include_window;
  ckpt::Manifest manifest = describe_run(tag, options);
  if (pending) {
    const ckpt::WindowRecord record = final_on_error([&] { return describe_window(); });
    const std::int64_t lost =
        record.managed ? record.micro_batches + (record.since_step > 0 ? 1 : 0) : agreed.most_backwards;
    if (with_gradients) {
      manifest.window = record;
    } else {
      if (record.managed) manifest.counters["micro_steps"] -= record.micro_batches;
      if (world.rank() == 0)
        log_warning("checkpoint ", tag, " leaves out a window that isn't over: a load will miss ", lost,
                    lost == 1 ? " micro-batch" : " micro-batches", " (SaveOptions::include_window keeps it)");
    }
  }
  SavedKeys keys;
  keys.trainable = optimizer->keys();
  keys.trainable.insert(keys.trainable.begin(), kMasterKey);
  if (with_gradients) keys.trainable.push_back(kGradientKey);
  const SavePlan plan(layout, keys, agreed.active, buffers(), generator_states(world.device()));

  std::unique_ptr<SaveJob> job;
  together(*rounds, [&] {
    if (world.rank() == 0) {
      plan.describe(manifest);
      for (std::size_t p = 0; p < layout.parameters.size(); ++p) {
        manifest.parameters[p].steps = optimizer->steps(static_cast<int>(p));
        manifest.parameters[p].fresh = optimizer->fresh(static_cast<int>(p));
      }
    }
    const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.comm_timeout_seconds * 1000));
    job = std::make_unique<SaveJob>(SaveJob::Target{ckpt::CheckpointFolder(folder, {world.rank()}), std::move(manifest),
                                                    plan.tensors(world.rank()), world.rank(), world.size(),
                                                    options.keep_last, std::min(timeout, world.timeout()),
                                                    world.device(), policies.optimizer.pin_memory});
    job->begin();
  });
  SaveJob& begun = *job;
  or_clean_up(begun, [&] {
    if (options.asynchronous)
      start_save(plan, with_gradients, job);
    else
      write_now(plan, with_gradients, begun);
  });
}

void Engine::Impl::or_clean_up(const SaveJob& job, const std::function<void()>& step) {
  try {
    step();
  } catch (const CommError&) {
    end_with(std::current_exception());
    throw;
  } catch (...) {
    job.clean_up();
    throw;
  }
}

void Engine::Impl::write_now(const SavePlan& plan, bool with_gradients, SaveJob& job) {
  together(*rounds, [&] {
    bool produced = false;
    const auto tensors = [&](const SaveJob::Sink& sink) {
      produced = true;
      produce(plan, with_gradients, sink);
    };
    try {
      job.write(tensors);
    } catch (const IoError&) {
      if (!produced && with_gradients) produce(plan, true, [](const at::Tensor&) {});  // with the others
      throw;
    }
  });
  together(*rounds, [&] { job.commit(); });
}

void Engine::Impl::start_save(const SavePlan& plan, bool with_gradients, std::unique_ptr<SaveJob>& job) {
  std::vector<at::Tensor> memory;
  together(*rounds, [&] {
    memory = snapshot.take(plan.tensors(world.rank()), policies.optimizer.pin_memory, world.device(), ledger);
  });
  together(*rounds, [&] {
    std::size_t next = 0;
    std::int64_t filled = 0;  // elements of that one
    produce(plan, with_gradients, [&](const at::Tensor& part) {
      if (part.numel() == 0) return;
      for (; filled == memory[next].numel(); ++next) filled = 0;
      // A buffer may lie on another device, whose copies nobody waits for below.
      const bool non_blocking = part.device() == world.device();
      memory[next].view(-1).narrow(0, filled, part.numel()).copy_(part.reshape(-1), non_blocking);
      filled += part.numel();
    });
    tiers::DeviceStream::mark_current(world.device()).synchronize();  // the copies have read what training changes next
  });
  job->start(std::move(memory));
  saving = std::move(job);
}

bool Engine::Impl::poll_save() {
  if (!saving) return true;
  bool failed = false, done = true;
  for (const auto& of_rank : final_on_error([&] { return rounds->exchange({static_cast<double>(saving->state())}); })) {
    failed |= of_rank[0] == static_cast<double>(SaveJob::State::kFailed);
    done &= of_rank[0] == static_cast<double>(SaveJob::State::kDone);
  }
  if (!failed && !done) return false;
  const std::unique_ptr<SaveJob> job = std::move(saving);
  if (failed) job->abandon();
  or_clean_up(*job, [&] { together(*rounds, [&] { job->settle(); }); });
  return true;
}

void Engine::Impl::finish_save() {
  while (!poll_save()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

}  // namespace ballast
