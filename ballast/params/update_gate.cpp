#include "ballast/params/update_gate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "ballast/base/error.h"

namespace ballast {

void UpdateGate::adopt(int unit, at::Tensor full, WriteWatch* watch, int rank) {
  Lock lock(mutex_);
  State& state = at(unit);
  state.storage = FaultStorage(this, unit, std::move(full),
                               Error("params.read", "unit ", layout_.units[static_cast<std::size_t>(unit)].name,
                                     " was read without an operator while its update was in flight (rank ", rank,
                                     "; call engine.synchronize() before code that uses data_ptr())")
                                   .what(),
                               /*mapped=*/true);
  state.watch = watch;
  state.managed = true;
}

void UpdateGate::close_until(int unit, PendingUpdate update) {
  Lock lock(mutex_);
  if (!at(unit).managed) return;
  at(unit).storage.set_aside();
  at(unit).update = std::move(update);
}

void UpdateGate::settle(const Lock&, int unit) {
  State& state = at(unit);
  if (state.update) {
    state.update.wait(layout_.units[static_cast<std::size_t>(unit)].name);
    state.storage.put_back();
    state.storage.filled_on_current_stream();
  }
  if (state.away.defined()) {
    state.storage.map();
    state.storage.flat().copy_(state.away);
    state.storage.filled_on_current_stream();
    state.away.reset();
    if (moved_) moved_(unit);
  }
}

bool UpdateGate::take_away(int unit) {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unobserved;
  Lock lock(mutex_);
  settle(lock, unit);
  State& state = at(unit);
  if (!state.managed || state.storage.flat().numel() == 0) return false;
  state.away = state.storage.flat().to(at::kCPU, state.storage.flat().scalar_type(), false, /*copy=*/true);
  state.storage.unmap();
  return true;
}

void UpdateGate::settle(int unit) {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unobserved;
  Lock lock(mutex_);
  settle(lock, unit);
}

void UpdateGate::settle_all() {
  for (std::size_t u = 0; u < states_.size(); ++u) settle(static_cast<int>(u));
}

void UpdateGate::touch_and_pin(int unit) noexcept {
  const at::NoGradGuard no_grad;
  Lock lock(mutex_);
  try {
    settle(lock, unit);
    at(unit).storage.used_on_current_stream();
  } catch (const std::exception& e) {
    if (!failure_) failure_ = std::current_exception();
    at(unit).storage.arm(e.what());  // the operator must throw, not read nothing
  }
}

void UpdateGate::written(int unit, std::int64_t element) noexcept {
  Lock lock(mutex_);
  const auto slot = layout_.units[static_cast<std::size_t>(unit)].slot_at(element);
  if (slot && at(unit).watch != nullptr) at(unit).watch->mark(*slot);
}

void UpdateGate::touch_in_child(int unit) noexcept {
  at(unit).storage.arm_in_child(layout_.units[static_cast<std::size_t>(unit)].name);
}

std::exception_ptr UpdateGate::failure() const {
  Lock lock(mutex_);
  return failure_;
}

void UpdateGate::restore() {
  settle_all();
  abandon();
}

void UpdateGate::abandon() noexcept {
  Lock lock(mutex_);
  for (State& state : states_) {
    if (!state.managed) continue;
    state.storage.put_back();
    state.storage.surrender({});
    state.managed = false;
  }
}

}  // namespace ballast
