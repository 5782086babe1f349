#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/config/config.h"
#include "ballast/layout/layout.h"

namespace ballast {

/// How a stage and a placement treat optimizer states.
struct OptimizerPolicy {
  bool whole = false;  // stage 0: every rank keeps all of a unit's states, else its shard of them
  Tier tier = Tier::kDevice;
  bool pin_memory = false;  // host tier next to a device
};

/// One update's common values.
struct UpdateStep {
  double grad_factor = 1;           // the gradient is sum * grad_factor
  std::vector<double> lr;           // by parameter group
  const std::vector<bool>& active;  // by parameter: the others are skipped, step count included
};

/// fp32 master weights and moments of this rank's part of every trainable unit, and the update. One path for all stages
/// and placements: what differs is which elements are kept and where they lie.
class OptimizerStates {
 public:
  /// Callers' name of a parameter's update count, which stands next to keys().
  static constexpr const char* kStepKey = "step";

  OptimizerStates(const Layout& layout, const OptimizerConfig& config, const OptimizerPolicy& policy, int rank,
                  c10::Device device, std::shared_ptr<Ledger> ledger);

  /// Takes the unit's initial values ([padded], any dtype), before they are rounded to the compute dtype.
  void set_initial(const Unit& unit, const at::Tensor& original);
  /// The unit's compute-dtype parameters that updates write ([kept_range]). Where they are fp32 and on the states'
  /// tier, they are the master weights themselves.
  void bind(int unit, const at::Tensor& owned);

  /// The masters are apart from the bound parameters: a write to these alone would be lost.
  bool masters_apart(int unit) const { return !units_[static_cast<std::size_t>(unit)].master_is_bound; }

  /// Updates masters, moments and the bound parameters. sum: [kept_range] on the states' tier, not needed afterwards.
  /// Counts a step for each active parameter.
  void update(int unit, const at::Tensor& sum, const UpdateStep& step);

  /// Which elements of the unit this rank keeps.
  Range kept_range(int unit) const;
  /// Names of the states besides the master weights: "exp_avg", "exp_avg_sq", "momentum_buffer".
  std::vector<std::string> keys() const;
  /// fp32 [kept_range]; key "" or one of keys(). UseError for another key.
  const at::Tensor& state(int unit, const std::string& key) const;
  /// The masters of these elements were written through state(): rounds them into the bound parameters.
  void refresh_bound(int unit, Range elements);
  /// The parameter's moments were written through state(): SGD's next update builds on its buffer instead of starting
  /// it with the gradient, as torch.optim does where a buffer is there.
  void moments_written(int parameter) { fresh_[static_cast<std::size_t>(parameter)] = false; }

  /// Updates of the parameter so far; equal on all ranks. Adam's bias corrections follow from it.
  std::int64_t steps(int parameter) const { return steps_[static_cast<std::size_t>(parameter)]; }
  void set_steps(int parameter, std::int64_t steps) { steps_[static_cast<std::size_t>(parameter)] = steps; }
  int groups() const { return 1 + static_cast<int>(config_.groups.size()); }

  /// fp32 values kept per element besides the master weight.
  static int moments(const OptimizerConfig& config);

 private:
  struct UnitStates {
    at::Tensor master, first, second, bound;
    bool master_is_bound = false;
    Ledger::Entry bytes;
  };
  /// A run of elements (of the kept range) that one call updates: same group, same step count, buffers alike.
  struct Segment {
    Range range;
    int group;
    std::int64_t step;
    bool fresh;
  };
  std::vector<Segment> segments(int unit, const UpdateStep& step);
  const OptimizerHyper& hyper(int group) const;
  void update_on_host(UnitStates& unit, const at::Tensor& sum, const Segment& segment, const UpdateStep& step);
  void update_on_device(UnitStates& unit, const at::Tensor& sum, const Segment& segment, const UpdateStep& step);

  const Layout& layout_;
  OptimizerConfig config_;
  OptimizerPolicy policy_;
  int rank_;
  c10::Device device_, states_device_;
  std::shared_ptr<Ledger> ledger_;
  std::vector<UnitStates> units_;
  std::vector<std::int64_t> steps_;  // by parameter: updates so far
  std::vector<bool> fresh_;          // by parameter: nothing has been put into its moments yet
};

}  // namespace ballast
