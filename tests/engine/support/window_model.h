#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ballast/engine/engine.h"
#include "tests/engine/support/plain_optimizer.h"

namespace ballast::testing {

/// What the accumulation window means, without ranks, shards, dtypes or placements: the specification of Engine's calls
/// as code. One object stands for all ranks; all arithmetic is in double precision.
class WindowModel {
 public:
  struct Rules {
    int world = 1;
    bool managed = true;
    int accumulation_steps = 1;
    double clip = 0;  // 0: off
  };
  using Tensors = std::map<std::string, at::Tensor>;  // fp64, by name

  WindowModel(const Rules& rules, Tensors start)
      : rules_(rules), values_(std::move(start)), backwards_(static_cast<std::size_t>(rules.world)) {}

  /// One rank's backward. gradients: of the parameters that its graph reaches.
  void backward(int rank, const Tensors& gradients, const BackwardOptions& options);
  /// All ranks. loss_scale isn't modelled.
  StepReport step();
  void zero_grad() { clear(); }
  void set_boundary(bool boundary) { boundary_ = boundary; }
  bool boundary() const;

  bool empty() const { return !any_backward(); }
  /// Sum over all contributions of the window, weighted; undefined where there is none.
  at::Tensor sum(const std::string& name) const;
  /// What full_grad() divides that by: as step() will if the window gets the configured length.
  double gradient_divisor() const;
  const at::Tensor& value(const std::string& name) const { return values_.at(name); }
  const Counters& counters() const { return counters_; }

 private:
  bool any_backward() const;
  double normaliser() const;
  void clear();
  StepReport apply(StepReport report);

  Rules rules_;
  Tensors values_;
  PlainAdam adam_;
  Counters counters_;
  std::optional<bool> boundary_;  // the caller's word in managed mode, kept until the next

  // The window.
  Tensors sums_;
  std::vector<std::int64_t> backwards_;  // by rank
  std::int64_t micro_batches_ = 0;       // managed: step() calls that found a new backward on some rank
  bool new_backward_ = false;            // some rank has run one since the last step()
  bool weighted_ = false, summed_ = false;
  double weight_ = 0;
};

}  // namespace ballast::testing
