#include "ballast/engine/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/engine/host_budget.h"
#include "ballast/engine/host_threads.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/module_walk.h"
#include "ballast/engine/rank_errors.h"
#include "ballast/engine/rank_likeness.h"
#include "ballast/tiers/host_memory.h"

namespace ballast {
namespace {

// A Config filled in code has passed no check yet; reading it back passes all of them.
Config checked(const Config& config) {
  Config read = Config::from_json(config.to_json());
  read.notices = config.notices;
  return read;
}

}  // namespace

Engine::Impl::Impl(std::shared_ptr<torch::nn::Module> module_in, const Config& config_in, World world_in,
                   const EngineOptions& options)
    : config(checked(config_in)),
      world(std::move(world_in)),
      module(std::move(module_in)),
      given_buffers(options.buffers),
      ledger(Ledger::create()),
      batch(resolve_batch(config, world.size())),
      policies(make_policies(config, world.size())),
      window(config.managed_gradient_accumulation, batch.accumulation_steps),
      scaler(config.fp16),
      schedule(config.scheduler, config.optimizer),
      progress(config, world) {
  const at::NoGradGuard no_grad;
  if (!module) throw UseError("engine.Engine", "the module is null");
  claim = ModuleClaim(*module);
  WalkedModule walked = walk(*module, config);
  if (walked.parameters.empty())
    throw UseError("engine.Engine", "the module has no parameters (register them before the engine is made)");
  layout = make_layout(std::move(walked.parameters), world.size());

  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.comm_timeout_seconds * 1000));
  gather = world.communicator("gather", world.device(), timeout);
  reduce = world.communicator("reduce", world.device(), timeout);
  rounds = std::make_unique<Rounds>(world.communicator("agree", c10::kCPU, timeout), Reducer::bits(layout),
                                    [this](int unit) { return layout.units[static_cast<std::size_t>(unit)].name; });

  check_same_everywhere(*rounds, config, layout);

  const int ranks_here = ranks_on_this_machine(*rounds);
  check_host_budget(layout, config,
                    {.world = world.size(), .device = world.device().type(), .backwards = batch.accumulation_steps},
                    ranks_here, tiers::available_host_bytes());
  const std::vector<Tier> states_tier = place_states(layout, policies.optimizer);
  if (policies.optimizer.tier != Tier::kDevice)
    lane = std::make_unique<tiers::HostLane>(world.device(), host_threads(config, ranks_here, world.device()));
  optimizer = std::make_unique<OptimizerStates>(layout, config.optimizer, policies.optimizer, states_tier, world.rank(),
                                                world.device(), lane.get(), ledger);
  params = std::make_unique<ParamStore>(
      layout, policies.params, walked.tensors, world.device(), gather, *rounds, ledger, lane.get(),
      [this](const Unit& unit, const at::Tensor& original) { optimizer->set_initial(unit, original); },
      options.materialize ? [&](const std::vector<int>& parameters) { return materialize(options, parameters); }
                          : ParamStore::Materialize());
  for (const Unit& unit : layout.units) {
    if (!unit.trainable) continue;
    rebind(unit.id);
    if (optimizer->masters_apart(unit.id)) params->watch_writes(unit.id);
  }

  for (at::Tensor& buffer : walked.buffers) {
    at::Tensor values = buffer.detach().to(world.device()).contiguous();
    if (values.numel() > 0) gather->broadcast(values, 0, "buffers").wait();
    const bool cast = values.scalar_type() == at::kFloat && (config.bf16 || config.fp16.enabled);
    buffer.set_data(cast ? values.to(config.bf16 ? at::kBFloat16 : at::kHalf) : values);
  }

  grads = std::make_unique<GradientStore>(layout, policies.grads, world.rank(), ledger, make_host_sums(states_tier));
  reducer = std::make_unique<Reducer>(layout, policies.grads, *grads, world.device(), reduce, *rounds, ledger);
  std::vector<at::Tensor> hooked;
  std::vector<int> owner;  // of each, the parameter
  for (std::size_t p = 0; p < walked.tensors.size(); ++p) {
    if (!layout.parameters[p].trainable) continue;
    hooked.insert(hooked.end(), walked.tensors[p].begin(), walked.tensors[p].end());
    owner.resize(hooked.size(), static_cast<int>(p));
  }
  hooks = std::make_unique<GradientHooks>(hooked, [this, owner](int tensor, at::Tensor gradient) {
    take_gradient(owner[static_cast<std::size_t>(tensor)], std::move(gradient));
  });
  backward_ends = std::make_unique<BackwardEnds>([this] {
    if (running_backward) end_backward();
  });
  lr = schedule.lr(0);
  if (lane) progress.watch(*lane);
  if (world.rank() == 0)
    for (const std::string& notice : config.notices) log_info(notice);
}

std::vector<at::Tensor> Engine::Impl::materialize(const EngineOptions& options, const std::vector<int>& parameters) {
  std::vector<at::Tensor> made;
  together(*rounds, [&] {
    if (world.rank() != 0) return;
    std::vector<std::string> names;
    for (const int p : parameters) names.push_back(layout.parameters[static_cast<std::size_t>(p)].name());
    made = options.materialize(names);
    check_eq<UseError>("engine.materialize", "one tensor a name", made.size(), names.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::vector<std::int64_t>& shape = layout.parameters[static_cast<std::size_t>(parameters[i])].shape;
      if (!made[i].defined() || made[i].is_meta() || made[i].sizes() != at::IntArrayRef(shape))
        throw UseError("engine.materialize", "no values, or of another shape (", names[i], ", got ",
                       made[i].defined() ? c10::str(made[i].sizes(), " on ", made[i].device()) : "an undefined tensor",
                       ", want ", at::IntArrayRef(shape), ")");
    }
  });
  return made;
}

// The sums of units whose update runs on the host.
std::unique_ptr<HostSums> Engine::Impl::make_host_sums(const std::vector<Tier>& states_tier) {
  if (!lane || policies.grads.tier == Tier::kDevice) return nullptr;
  std::vector<std::int64_t> sizes(layout.units.size(), 0);
  for (const Unit& unit : layout.units)
    if (unit.trainable && states_tier[static_cast<std::size_t>(unit.id)] != Tier::kDevice)
      sizes[static_cast<std::size_t>(unit.id)] = policies.grads.keep_whole_sum ? unit.padded : unit.shard;
  HostSums::Options options = host_sums_options(policies);
  options.rank = world.rank();
  for (const Unit& unit : layout.units) options.names.push_back(unit.name);
  // Enough for the host to queue the backward of the next units while the device is still at this one.
  constexpr std::int64_t kUnitsAhead = 3;
  options.in_flight =
      std::min(policies.grads.max_in_flight, kUnitsAhead * *std::max_element(sizes.begin(), sizes.end()));
  return std::make_unique<HostSums>(std::move(sizes), policies.grads.keep_whole_sum ? world.size() : 1, world.device(),
                                    options, *lane, ledger);
}

void Engine::Impl::check_usable() {
  if (running_backward && running_backward->outermost != -1 && running_backward->outermost != BackwardEnds::outermost())
    fail_backward();  // an exception ended it past us
  if (failure) std::rethrow_exception(failure);
  if (kept) std::rethrow_exception(std::exchange(kept, nullptr));
  // An update that step() promised can't be taken back: the parameters are neither old nor new.
  if (lane) final_on_error([&] { lane->rethrow_failure(); });
  params->rethrow_failure();
}

void Engine::Impl::refuse_in_backward(const char* operation) const {
  if (running_backward)
    throw UseError(operation,
                   "called inside a running backward, whose gradients are partly in (from a hook or an "
                   "autograd function; call it when the backward has returned)");
}

void Engine::Impl::refuse_in_child() const {
  if (!process.is_here())
    throw UseError(
        "engine.fork",
        "the engine belongs to the process that made it, and this is a forked child (start the process anew, "
        "as multiprocessing's \"spawn\" does, or make an engine in it)");
}

ScopeGuard Engine::Impl::guard(std::function<void()> end) {
  auto while_running = [engine = std::weak_ptr<const bool>(alive), end = std::move(end), process = process] {
    if (!engine.expired() && process.is_here()) end();
  };
  auto quietly = [this, while_running] {
    try {
      while_running();
    } catch (...) {
      kept = std::current_exception();
    }
  };
  return ScopeGuard(std::move(while_running), std::move(quietly));
}

// As step() does: ranks with fewer backwards join the others' rounds here until everybody has come to its call.
Agreed Engine::Impl::meet(Call call, int unit) {
  if (call != Call::kMoveStates) refuse_while_away("engine.access");
  Agreed agreed;
  do {
    agreed = reducer->round(call, announce(false), unit);
  } while (!agreed.all_arrived);
  if (lane) lane->drain();  // the communicators are this thread's from here on
  return agreed;
}

Announcement Engine::Impl::announce(bool reduce_now) const {
  Announcement mine;
  mine.reduce = reduce_now;
  mine.ends_window = window.boundary();
  mine.backward_since_step = window.backwards_since_step() > 0;
  mine.scaling = static_cast<std::uint32_t>(window.scaling());
  mine.weight = window.weight();
  mine.settings = digest(lr);
  return mine;
}

// ---- the public face ------------------------------------------------------------------------------------------------

Engine::Engine(std::shared_ptr<torch::nn::Module> module, const Config& config, World world,
               const EngineOptions& options)
    : impl_(std::make_unique<Impl>(std::move(module), config, std::move(world), options)) {}

Engine::~Engine() {
  if (impl_ && !impl_->process.is_here()) abandon();
  try {
    shutdown();
  } catch (const std::exception& e) {
    log_warning("while the engine ended: ", e.what());
  }
}

void Engine::abandon() noexcept {
  if (impl_ && !impl_->process.is_here()) static_cast<void>(impl_.release());  // its threads can't be joined
  impl_.reset();
}

void Engine::shutdown() {
  if (!impl_) return;
  impl_->refuse_in_child();
  impl_->refuse_in_backward("engine.shutdown");
  const std::unique_ptr<Impl> impl = std::move(impl_);
  impl->backward_ends.reset();
  impl->hooks.reset();
  if (impl->failure || impl->params->failure() || std::uncaught_exceptions() > 0) return;  // as abandon()
  std::exception_ptr unsaved;
  try {
    impl->finish_save();
  } catch (const IoError&) {  // the engine ends all the same, its parameters go back
    unsaved = std::current_exception();
  }
  impl->params->restore();  // otherwise the store's end leaves what this rank has
  if (impl->lane)
    impl->lane->run([&] {
      impl->optimizer->close();
      impl->grads->close();
    });
  if (unsaved) std::rethrow_exception(unsaved);
}

Engine::Impl& Engine::running() const {
  if (!impl_) throw UseError("engine.shutdown", "the engine has ended (shutdown() was called; make a new one)");
  impl_->refuse_in_child();
  return *impl_;
}

void Engine::zero_grad() {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.zero_grad");
  const at::NoGradGuard no_grad;
  engine.final_on_error([&] { engine.reducer->come_level(engine.announce(false)); });
  engine.drop_window();
  for (std::size_t p = 0; p < engine.layout.parameters.size(); ++p)
    for (const at::Tensor& tensor : engine.params->tensors(static_cast<int>(p))) tensor.mutable_grad().reset();
}

bool Engine::is_gradient_accumulation_boundary() const { return running().window.boundary(); }
void Engine::set_gradient_accumulation_boundary(bool is_boundary) { running().window.set_boundary(is_boundary); }

ScopeGuard Engine::no_sync() {
  running().check_usable();
  ++running().no_sync_guards;
  return running().guard([impl = &running()] { --impl->no_sync_guards; });
}

ScopeGuard Engine::coalesce_grad_reduction() {
  running().check_usable();
  ++running().coalesce_guards;
  return running().guard([impl = &running()] { impl->end_coalesce(); });
}

void Engine::Impl::end_coalesce() {
  if (--coalesce_guards > 0 || no_sync_guards > 0) return;  // kept on for the guard that still lives
  if (failure || !policies.grads.reduce_every_backward || window.broken()) return;
  const at::NoGradGuard no_grad;
  final_on_error([&] { return reducer->round(Call::kCoalesce, announce(true)); });
}

void Engine::synchronize() {
  running().check_usable();
  running().params->finish_publish();
  running().finish_save();
}

Counters Engine::counters() const { return running().counters; }
double Engine::loss_scale() const { return running().scaler.scale(); }
std::vector<double> Engine::lr() const { return running().lr; }

int Engine::group_of(const std::string& name) const {
  const Layout& layout = running().layout;
  return layout.parameters[static_cast<std::size_t>(layout.find(name))].group;
}

void Engine::set_lr(const std::vector<double>& lr) {
  check_eq<UseError>("engine.set_lr", "one learning rate a parameter group", lr.size(), running().lr.size());
  for (double rate : lr)
    if (!(std::isfinite(rate) && rate >= 0))
      throw UseError("engine.set_lr", "a learning rate is not a finite number >= 0 (", rate, ")");
  running().lr = lr;
}

const Ledger& Engine::memory() const { return *running().ledger; }
const World& Engine::world() const { return running().world; }
const Config& Engine::config() const { return running().config; }

}  // namespace ballast
