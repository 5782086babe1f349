#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "ballast/layout/layout.h"
#include "ballast/params/fault.h"
#include "ballast/params/pending_update.h"
#include "ballast/params/write_watch.h"

namespace ballast {

/// Makes step() lazy where a rank keeps whole parameters: while a unit's update is in flight its storage is unmapped,
/// and the first operator that needs it waits for exactly that unit. (Sharded units have Residency for that.)
///
/// Threads: touches come from whichever thread runs an operator; mutex_ makes them see each other's state. It may be
/// held while the host lane works, which never takes it.
class UpdateGate final : public FaultHandler {
 public:
  explicit UpdateGate(const Layout& layout) : layout_(layout), states_(layout.units.size()) {}
  ~UpdateGate() override { abandon(); }

  /// full: [padded], mapped; the parameters are views of its storage. watch: told of writes; outlives the gate.
  void adopt(int unit, at::Tensor full, WriteWatch* watch, int rank);

  /// Nobody sees the unit before this update, which is queued and may be running, has ended.
  void close_until(int unit, PendingUpdate update);
  /// Waits until the unit is visible. Throws what ended the lane.
  void settle(int unit);
  void settle_all();
  std::exception_ptr failure() const;

  /// Takes the unit's values to host memory and frees the device's; the first operator that needs them brings them
  /// back, to memory elsewhere. moved(unit): told of that, on the thread that runs the operator. Returns false, with
  /// nothing done, where the unit is empty.
  bool take_away(int unit);
  void on_moved(std::function<void(int unit)> moved) { moved_ = std::move(moved); }
  bool manages(int unit) const { return at(unit).managed; }

  /// Ordinary storages again, settled.
  void restore();

  void touch_and_pin(int unit) noexcept override;
  void unpin(int) noexcept override {}  // whole parameters never leave
  void written(int unit, std::int64_t element) noexcept override;
  void touch_in_child(int unit) noexcept override;

 private:
  struct State {
    FaultStorage storage;
    PendingUpdate update;
    at::Tensor away;  // the values on the host, while the device has none
    WriteWatch* watch = nullptr;
    bool managed = false;
  };
  using Lock = std::unique_lock<std::mutex>;
  State& at(int unit) { return states_[static_cast<std::size_t>(unit)]; }
  const State& at(int unit) const { return states_[static_cast<std::size_t>(unit)]; }
  void settle(const Lock& held, int unit);
  void abandon() noexcept;

  const Layout& layout_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<State> states_;
  std::exception_ptr failure_;
  std::function<void(int)> moved_;
  FaultObserver observer_;  // last: no touch arrives before the state above stands
};

}  // namespace ballast
