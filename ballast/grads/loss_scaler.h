#pragma once

#include <cstdint>

#include "ballast/config/config.h"

namespace ballast {

/// What a fp16 loss is multiplied by before its backward: fixed, or following the overflows (Micikevicius et al., ICLR
/// 2018, section 3.2, in the form of DeepSpeed's DynamicLossScaler). 1 where fp16 is off. Dynamic:
/// - After `loss_scale_window` steps without overflow behind a first one, the scale doubles: at the third step with a
///   window of 2, and again every window. It never grows beyond kGreatest.
/// - An overflow takes one of the `hysteresis` lives; with the last life left it halves the scale instead, down to
///   min_loss_scale. Lives come back with the next growth, with consecutive_hysteresis at every step without overflow.
/// - An overflow that would have to halve the least scale is an error.
class LossScaler {
 public:
  static constexpr double kGreatest = 0x1p60;

  /// All that changes; a checkpoint keeps it.
  struct State {
    double scale = 1;
    std::int64_t steps = 0;           // updates so far
    std::int64_t last_overflow = -1;  // the number of the step that overflowed last, from 0
    int lives = 1;                    // left of the hysteresis

    bool operator==(const State&) const = default;
  };

  explicit LossScaler(const Fp16Config& config);

  double scale() const { return state_.scale; }

  /// After a window ended: did its gradient overflow on any rank? Throws UseError where the scale can't fall any more
  /// (the state is then unchanged): the gradients of this model or data are not finite at any scale that is allowed.
  void update(bool overflow);

  const State& state() const { return state_; }
  /// Takes a state up. A fixed scale keeps the configuration's, lives and scale stay within its bounds. Throws UseError
  /// where the scale is no positive finite number.
  void restore(const State& state);

 private:
  void shrink();
  void grow();

  Fp16Config config_;
  bool dynamic_;
  State state_;
};

}  // namespace ballast
