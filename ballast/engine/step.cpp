// The end of a window: the ranks' agreement, the norm, and the update, behind which step() returns.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/trace.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/rank_likeness.h"
#include "ballast/grads/arithmetic.h"

namespace ballast {

StepReport Engine::Impl::report(StepReason reason, const Agreed& agreed) const {
  StepReport report;
  report.reason = reason;
  report.applied = reason == StepReason::kApplied;
  report.loss_scale = scaler.scale();
  report.micro_batches = window.managed() ? window.micro_batches() : agreed.most_backwards;
  report.weight = agreed.weight;
  report.lr = lr;
  return report;
}

void Engine::Impl::refuse_assigned_gradients() const {
  for (std::size_t p = 0; p < layout.parameters.size(); ++p) {
    const ParameterInfo& info = layout.parameters[p];
    const std::vector<at::Tensor>& tensors = params->tensors(static_cast<int>(p));
    if (info.trainable &&
        std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return tensor.grad().defined(); }))
      throw UseError("engine.step", "a gradient was assigned to a parameter by hand (", info.name(),
                     "; step() takes what backwards and set_full_grad(name, value) bring; zero_grad() drops this one)");
  }
}

StepReport Engine::Impl::step() {
  const trace::Span call(trace::Lane::kCaller, "step");
  check_usable();
  refuse_in_backward("engine.step");
  refuse_while_away("engine.step");
  params->refuse_changed_module();
  refuse_assigned_gradients();
  params->refuse_lost_writes();
  const at::NoGradGuard no_grad;
  if (no_sync_guards + coalesce_guards > 0)
    throw UseError("engine.step", "step() inside ", no_sync_guards > 0 ? "no_sync()" : "coalesce_grad_reduction()",
                   " (end the guard first)");
  if (window.broken())
    throw UseError("engine.step",
                   "an exception left a backward of this window half done (call zero_grad() and run the window again)");

  params->finish_launching();
  // Ranks with fewer backwards join the others' rounds here until everybody has come to its step().
  Agreed agreed;
  do {
    const auto timer = progress.time(ProgressLog::kReduce);
    agreed = final_on_error([&] { return reducer->round(Call::kStep, announce(window.boundary())); });
  } while (!agreed.all_arrived);
  poll_save();
  if (window.boundary() && !agreed.same_settings) final_on_error([&] { refuse_different_rates(*rounds, lr); });
  window.complete_micro_batch(agreed.any_backward);
  rounds->counts().micro_batches = window.micro_batches();
  counters.micro_steps += window.managed() ? (agreed.any_backward ? 1 : 0) : agreed.most_backwards;

  const bool anything =
      agreed.most_backwards > 0 || std::find(agreed.active.begin(), agreed.active.end(), true) != agreed.active.end();
  if (!anything) return report(StepReason::kEmptyWindow, agreed);
  if (!window.ended()) return report(StepReason::kMidWindow, agreed);

  const auto scaling = static_cast<Window::Scaling>(agreed.scaling);
  const double normaliser = window.normaliser(scaling, world.size(), agreed.weight);
  if (normaliser == 0) {
    if (world.rank() == 0) log_warning("a window whose weights add up to 0 was dropped");
    StepReport empty = report(StepReason::kEmptyWindow, agreed);
    drop_window();
    return empty;
  }
  if (window.managed() && window.micro_batches() != window.accumulation_steps() && world.rank() == 0)
    log_info("a window ended after ", window.micro_batches(), " of ", window.accumulation_steps(),
             " micro-batches and averages those");

  return final_on_error([&] {
    const double unscale = 1 / (normaliser * scaler.scale());
    const double square = norm_squared();
    const bool finite = std::isfinite(square);
    StepReport done = report(finite ? StepReason::kApplied : StepReason::kNonFinite, agreed);
    done.grad_norm = std::sqrt(square) * unscale;
    ++counters.global_steps;
    counters.global_samples += batch.train_batch;
    if (finite) {
      const double clip = config.gradient_clipping;
      if (clip > 0 && done.grad_norm > clip)
        done.clip_factor = clip / (done.grad_norm + 1e-6);  // as torch's clip_grad_norm_
      update(unscale * done.clip_factor, agreed);
      ++counters.applied_steps;
      // Without a schedule a rate that the caller has set stays.
      if (config.scheduler.type != SchedulerType::kNone) lr = schedule.lr(counters.applied_steps - schedule_begin);
    } else {
      ++counters.skipped_steps;
    }
    drop_window();
    progress.window_ended(done, counters);
    scaler.update(!finite);
    return done;
  });
}

// Partial sums are per shard and added in rank order, in every stage: a rank that keeps the whole sum forms them all.
double Engine::Impl::norm_squared() {
  const auto timer = progress.time(ProgressLog::kNorm);
  SquareSums squares(world.size());
  for (const Unit& unit : layout.units) grads->add_squares(unit.id, squares);
  std::vector<double> partial = squares.sums();
  if (!policies.grads.keep_whole_sum) {
    const auto all = rounds->exchange({partial[static_cast<std::size_t>(world.rank())]});
    for (std::size_t r = 0; r < all.size(); ++r) partial[r] = all[r].front();
  }
  double total = 0;
  for (double p : partial) total += p;
  return total;
}

// Updates run in forward order, so that those behind the step() are through when the next forward wants their units.
// Persistent units come before: they are gathered at once.
void Engine::Impl::update(double factor, const Agreed& agreed) {
  const UpdateStep step{factor, lr, agreed.active};
  for (const bool persistent : {true, false})
    for (const Unit& unit : layout.units)
      if (params->persistent(unit.id) == persistent && grads->has_landed(unit.id)) update(unit.id, step);
  const auto timer = progress.time(ProgressLog::kPublish);
  if (!lane) params->finish_publish();
}

void Engine::Impl::update(int unit, const UpdateStep& step) {
  std::function<void()> later;
  {
    const auto timer = progress.time(ProgressLog::kUpdate);
    auto run = [this, update = optimizer->prepare(unit, grads->landing(unit), step)] {
      const auto access = update.all ? ShardHome::Access::kReplace : ShardHome::Access::kChange;
      params->with_owned(update.unit, access, [&](const at::Tensor& owned) { optimizer->run(update, owned); });
    };
    if (optimizer->on_device(unit)) {
      params->settle(unit);  // unless a forward did: the last step's gather may still be under way
      const tiers::DeviceSpan work(trace::Lane::kCompute, "update", layout.units[static_cast<std::size_t>(unit)].name,
                                   world.device());
      run();
    } else {
      later = std::move(run);
    }
    grads->release(unit);
  }
  const auto timer = progress.time(ProgressLog::kPublish);
  params->publish(unit, step.active, std::move(later));
}

void Engine::Impl::drop_window() {
  reducer->abandon();
  grads->clear();
  window.clear();
  rounds->counts() = {window.number(), 0, 0};
}

StepReport Engine::step() { return running().step(); }

}  // namespace ballast
