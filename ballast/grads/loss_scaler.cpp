#include "ballast/grads/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "ballast/base/error.h"

namespace ballast {

LossScaler::LossScaler(const Fp16Config& config) : config_(config), dynamic_(config.enabled && config.loss_scale == 0) {
  if (config_.enabled) state_.scale = dynamic_ ? std::ldexp(1.0, config_.initial_scale_power) : config_.loss_scale;
  if (dynamic_) state_.lives = config_.hysteresis;
}

void LossScaler::update(bool overflow) {
  if (!dynamic_) return;
  if (overflow) {
    shrink();
    state_.last_overflow = state_.steps;
  } else {
    if (config_.consecutive_hysteresis) state_.lives = config_.hysteresis;
    const std::int64_t stable = state_.steps - state_.last_overflow - 1;
    if (stable > 0 && stable % config_.loss_scale_window == 0) grow();
  }
  ++state_.steps;
}

void LossScaler::shrink() {
  if (state_.lives > 1) {
    --state_.lives;
    return;
  }
  if (state_.scale <= config_.min_loss_scale) {
    throw UseError(
        "grads.update_loss_scale", "gradients are not finite at the least loss scale (scale ", state_.scale,
        ", fp16.min_loss_scale = ", config_.min_loss_scale, ", step ", state_.steps,
        "; look for a loss that is not finite, lower the learning rate or fp16.min_loss_scale, or use bf16)");
  }
  state_.scale = std::max(state_.scale / 2, config_.min_loss_scale);
}

void LossScaler::grow() {
  state_.lives = config_.hysteresis;
  state_.scale = std::min(state_.scale * 2, std::max(state_.scale, kGreatest));
}

void LossScaler::restore(const State& state) {
  if (!std::isfinite(state.scale) || state.scale <= 0) {
    throw UseError("grads.restore_loss_scale", "not a loss scale (", state.scale, "; want a positive finite number)");
  }
  if (!dynamic_) return;
  state_ = state;
  state_.scale = std::max(state.scale, config_.min_loss_scale);
  state_.lives = std::clamp(state.lives, 1, config_.hysteresis);
}

}  // namespace ballast
