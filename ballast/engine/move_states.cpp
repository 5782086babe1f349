// offload_states(), reload_states(): the device's memory for somebody else between phases of training.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <set>

#include "ballast/base/error.h"
#include "ballast/engine/impl.h"

namespace ballast {

void Engine::Impl::refuse_while_away(const char* operation) const {
  if (!away.empty()) throw UseError(operation, "states are offloaded (call engine.reload_states() first)");
}

void Engine::offload_states(const std::vector<StateKind>& kinds) {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.offload_states");
  const at::NoGradGuard no_grad;
  const std::set<StateKind> wanted(kinds.begin(), kinds.end());
  engine.final_on_error([&] {
    engine.meet(Call::kMoveStates, 0);
    const auto starts = [&](StateKind kind) { return wanted.contains(kind) && engine.away.insert(kind).second; };
    if (starts(StateKind::kGradients)) engine.grads->move(c10::kCPU, Tier::kHost);
    if (starts(StateKind::kOptimizer)) engine.optimizer->move(c10::kCPU, Tier::kHost);
    if (starts(StateKind::kParameters)) engine.params->take_away([&engine](int unit) { engine.rebind(unit); });
    const c10::Device device = engine.world.device();
    if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();
  });
}

void Engine::reload_states() {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.reload_states");
  if (engine.away.empty()) return;
  const at::NoGradGuard no_grad;
  engine.final_on_error([&] {
    const std::set<StateKind> back = std::exchange(engine.away, {});
    engine.meet(Call::kMoveStates, 0);
    const c10::Device device = engine.world.device();
    if (back.contains(StateKind::kParameters)) engine.params->bring_back([&engine](int unit) { engine.rebind(unit); });
    if (back.contains(StateKind::kOptimizer)) engine.optimizer->move(device, Tier::kDevice);
    if (back.contains(StateKind::kGradients)) engine.grads->move(device, Tier::kDevice);
  });
}

void Engine::Impl::rebind(int unit) {
  if (layout.units[static_cast<std::size_t>(unit)].trainable && !optimizer->masters_apart(unit))
    optimizer->bind_masters(unit, params->owned(unit));
}

}  // namespace ballast
