#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ballast {

/// What one rank knows of the window, all backwards between two ends: mode, counts, weights and how the sum will be
/// normalised. Managed and caller-owned windows are this one mechanism; they differ in who says that it ends.
class Window {
 public:
  /// How a window's sum becomes a step's gradient. One kind a window.
  enum class Scaling : std::uint8_t {
    kUnset,
    kMean,      // divided by world * accumulation steps
    kSum,       // divided by world (scale_wrt_gas = false)
    kWeighted,  // divided by the global sum of weights
  };

  /// managed: the engine counts micro-batches up to accumulation_steps; else the caller's step() ends every window.
  Window(bool managed, std::int64_t accumulation_steps) : managed_(managed), accumulation_steps_(accumulation_steps) {}

  bool managed() const { return managed_; }

  /// Checks and takes in one backward. UseError, with nothing changed, for a bad weight or a second kind of scaling.
  void begin_backward(std::optional<double> weight, bool scale_wrt_gas);

  /// A gradient was given by its value before any rank's first backward: what it was multiplied by for the sum stays
  /// right only if no backward with a weight comes.
  void take_given();

  /// Managed: the next step() ends the window.
  bool boundary() const;
  /// UseError in caller-owned mode.
  void set_boundary(bool is_boundary);

  /// At step(): one micro-batch is complete. any_backward: some rank has run a backward since the last step(); without,
  /// there is nothing to count.
  void complete_micro_batch(bool any_backward);
  /// Managed: after complete_micro_batch, has the window ended?
  bool ended() const;

  /// Divisor of the sum over all ranks' contributions. weight_sum: over all ranks.
  double normaliser(Scaling scaling, int world, double weight_sum) const;

  /// Takes up a window that was saved. weight: this rank's.
  void restore(Scaling scaling, double weight, std::int64_t backwards, std::int64_t since_step,
               std::int64_t micro_batches);

  /// The window is over: contributions, weights and counts start anew.
  void clear();

  /// An exception left a backward half done, so that its gradients are partly in: nothing but clear() helps.
  void mark_broken() { broken_ = true; }
  bool broken() const { return broken_; }

  Scaling scaling() const { return scaling_; }
  double weight() const { return weight_; }
  std::int64_t backwards() const { return backwards_; }
  std::int64_t backwards_since_step() const { return backwards_since_step_; }
  std::int64_t micro_batches() const { return micro_batches_; }
  std::int64_t number() const { return number_; }
  std::int64_t accumulation_steps() const { return accumulation_steps_; }

 private:
  std::string so_far() const;

  bool managed_;
  std::int64_t accumulation_steps_;
  Scaling scaling_ = Scaling::kUnset;
  double weight_ = 0;
  std::int64_t backwards_ = 0, backwards_since_step_ = 0, micro_batches_ = 0, number_ = 0;
  std::optional<bool> boundary_;  // the caller's word, where it gave one
  bool broken_ = false;
};

}  // namespace ballast
