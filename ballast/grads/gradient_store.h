#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/grads/host_sums.h"
#include "ballast/grads/policy.h"
#include "ballast/layout/layout.h"

namespace ballast {

/// The two places where a gradient rests: a unit's contributions of this rank, whole and not yet reduced, and the sum
/// over ranks that has landed, of which the rank keeps what its stage says. (The other two places are param.grad, until
/// the hook, and a reduction in flight.) Every contribution is in exactly one of them.
class GradientStore {
 public:
  /// host: keeps the sums of some units, or null.
  GradientStore(const Layout& layout, const GradPolicy& policy, int rank, std::shared_ptr<Ledger> ledger,
                std::unique_ptr<HostSums> host = nullptr);

  /// Adds one parameter's gradient (shape and dtype of the parameter) to its unit's contributions. The first of a
  /// parameter may stay as it is until it is copied together with others of its unit: give it away.
  void contribute(int parameter, at::Tensor gradient);
  bool holds(int unit) const { return at(unit).contributed > 0; }
  /// More than one contribution to some parameter has been added up: it travels in the accumulation dtype.
  bool mixed(int unit) const { return at(unit).mixed; }
  /// Every parameter of the unit has contributed.
  bool complete(int unit) const { return at(unit).contributed == static_cast<int>(at(unit).has.size()); }
  /// Some contribution in this window, here.
  bool active(int parameter) const { return active_[static_cast<std::size_t>(parameter)]; }

  /// Moves the contributions out: [padded], compute dtype, or accumulation dtype if mixed. Undefined where there are
  /// none.
  at::Tensor take(int unit);
  /// A look at the same without moving.
  const at::Tensor& local(int unit);

  /// Adds a sum over ranks (fp32, or the dtype of the only rank's contributions) to what landed before: [padded] with
  /// keep_whole_sum, else [shard].
  void land(int unit, at::Tensor sum);
  bool has_landed(int unit) const { return at(unit).landed; }
  /// The sum, complete, on the device or the host. Undefined where nothing has landed in this window.
  at::Tensor landed(int unit);
  /// The sum for its update. It has landed; what is under way comes first.
  LandedSum landing(int unit);
  bool on_host(int unit) const { return host_ && host_->keeps(unit); }
  /// Adds the squares of landed(unit) to the ranks whose shards it holds.
  void add_squares(int unit, SquareSums& squares);
  /// Which elements of the unit landed(unit) holds.
  Range landed_range(int unit) const;

  /// Replaces one parameter's gradient by `sum`, fp32 of its shape, the sum over all ranks: contributions that are
  /// still here count as part of it.
  void overwrite(int parameter, const at::Tensor& sum);

  /// Takes what lies on the device to host memory or back, bit for bit. tier: which of the two `to` is.
  void move(c10::Device to, Tier tier);

  /// Lets the unit's sum go: its update has read it.
  void release(int unit);
  /// Drops the whole window.
  void clear();
  /// Ends what the host lane's thread drives, on that thread.
  void close() {
    if (host_) host_->close();
  }

 private:
  struct Arrival {
    int slot;
    at::Tensor gradient;
  };
  struct UnitGrads {
    at::Tensor local, sum;
    std::vector<Arrival> arrivals;   // first contributions that are not in local yet
    std::int64_t arrived_bytes = 0;  // of those
    std::vector<bool> has;           // by slot: a contribution is in local or has arrived
    int contributed = 0;
    bool mixed = false;
    bool landed = false;                   // in this window
    Ledger::Entry local_bytes, sum_bytes;  // local's from the first arrival on
  };
  const UnitGrads& at(int unit) const { return units_[static_cast<std::size_t>(unit)]; }
  UnitGrads& at(int unit) { return units_[static_cast<std::size_t>(unit)]; }
  void gather_arrivals(int unit);
  void drop(int unit);
  void set_sum(UnitGrads& unit, at::Tensor sum);

  const Layout& layout_;
  GradPolicy policy_;
  int rank_;
  std::shared_ptr<Ledger> ledger_;
  std::unique_ptr<HostSums> host_;
  std::vector<UnitGrads> units_;
  std::vector<bool> active_;
};

}  // namespace ballast
