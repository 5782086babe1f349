#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/rounds.h"
#include "ballast/layout/layout.h"
#include "ballast/params/fault.h"
#include "ballast/params/fault_order.h"
#include "ballast/params/pending_update.h"
#include "ballast/params/shard_home.h"
#include "ballast/params/write_watch.h"
#include "ballast/tiers/device_span.h"

namespace ballast {

/// Where a sharded unit's full values are. Device bytes a rank: P = padded unit bytes, W = world size.
enum class Residence : std::uint8_t {
  kSharded,    // P/W, or nothing where shards rest off the device; storage unmapped
  kGathering,  // P/W + P; a prefetch, not readable yet
  kMapped,     // P/W + P; may leave when nothing pins it
};

struct ResidencyLimits {
  std::int64_t max_live = 0;  // elements mapped at most; one unit is mapped even if it is larger
  std::int64_t prefetch = 0;  // elements gathered ahead at most
};

/// Gathers a unit's parameters when an operator touches them, ahead of that where the order is known, and lets the
/// oldest go when the bound is reached. What it gathers and drops is a function of the sequence of faults alone, never
/// of time, so that all ranks launch the same gathers in the same order; before each, the ranks compare which unit they
/// want, and a difference is an error that names both.
///
/// Threads: touches come from whichever thread runs an operator (the caller's, or autograd's while the caller waits in
/// backward); mutex_ makes them see each other's state. With peers, two threads that run operators on parameters at the
/// same time would make the order of gathers a matter of timing: refused.
class Residency final : public FaultHandler {
 public:
  /// shards: what gathers read.
  Residency(const Layout& layout, ShardHome& shards, Rounds& rounds, std::shared_ptr<Communicator> gather,
            c10::Device device, std::shared_ptr<Ledger> ledger, ResidencyLimits limits);
  ~Residency() override { abandon(); }  // also after a constructor of ParamStore that threw

  /// Takes over a sharded unit. full: [padded], the parameters are views of its storage; it is unmapped here.
  /// parameters: by slot, the tensors that are views of it. persistent: gathered now and after every update.
  void adopt(int unit, at::Tensor full, std::vector<std::vector<at::Tensor>> parameters, bool persistent);

  void touch_and_pin(int unit) noexcept override;
  void written(int unit, std::int64_t element) noexcept override;
  void unpin(int unit) noexcept override;
  void touch_in_child(int unit) noexcept override;

  /// Maps the unit for a caller that reads by pointer and keeps it until let_go. Collective. Throws what a touch
  /// records.
  void hold(int unit);
  void let_go(int unit) noexcept;

  /// The shard is about to get new values: mapped copies are stale and go. No operator runs.
  void close(int unit);
  /// The new values are there once `update` is through, which the next gather waits for (persistent and held units are
  /// gathered now).
  void open_after(int unit, PendingUpdate update);
  /// Waits until the shard has its newest values.
  void settle(int unit);
  /// The shard has moved, with the same values. What is mapped goes; regather: persistent units are gathered again.
  void shard_moved(int unit, bool regather);
  bool persistent(int unit) const { return at(unit).persistent; }
  /// The slot of a parameter whose mapped copy somebody wrote in place: that would be lost.
  std::optional<std::size_t> lost_write(int unit) const;
  /// The slot's mapped values were changed on purpose (gathered with a writer) or are going to be replaced.
  void accept_write(int unit, std::size_t slot);

  /// The engine has ended with this error: an operator that would have to gather throws it instead of waiting for peers
  /// that may be gone.
  void refuse(std::exception_ptr cause) noexcept;

  /// The error that made an operator throw, or null. Rethrow it in the engine's next call: it has the cause.
  std::exception_ptr failure() const;

  /// Maps everything for good and gives the module ordinary storages. Collective.
  void restore();
  /// The same without peers: unmapped parameters stay empty. For the end after an error.
  void abandon() noexcept;

  std::int64_t faults() const { return faults_; }          // gathers that an operator waited for from the start
  std::int64_t prefetched() const { return prefetched_; }  // touches that found a gather already launched

 private:
  struct State {
    FaultStorage storage;
    WriteWatch watch;  // of the mapped copy
    Residence residence = Residence::kSharded;
    bool managed = false, persistent = false;
    bool touched = false;  // since it was mapped: a prefetched unit that nothing has used yet isn't
    bool behind = false;   // updated behind a step() and not gathered since: unlike `update`, the same on all ranks
    int pins = 0;
    PendingUpdate update;        // of the shard
    tiers::DeviceEvent fetched;  // the shard is on the device, where it rests elsewhere
    PendingCollective gather;
    tiers::DeviceMark launched;  // the gather
    Ledger::Entry bytes;
  };
  /// Whoever holds it runs operators on units too, such as the copy that ends a gather in host memory. They must not be
  /// observed: the observer would come back here and wait for this very lock.
  class Lock {
   public:
    explicit Lock(std::mutex& mutex) : held_(mutex) {}

   private:
    at::DisableRecordFunctionGuard unobserved_;
    std::lock_guard<std::mutex> held_;
  };

  State& at(int unit) { return states_[static_cast<std::size_t>(unit)]; }
  const State& at(int unit) const { return states_[static_cast<std::size_t>(unit)]; }
  std::int64_t size(int unit) const { return layout_.units[static_cast<std::size_t>(unit)].padded; }
  const std::string& name(int unit) const { return layout_.units[static_cast<std::size_t>(unit)].name; }
  void use(const Lock& held, int unit);
  void fault(const Lock& held, int unit);
  void start_gather(const Lock& held, int unit);
  void fetch(const Lock& held, int unit);
  void finish_gather(const Lock& held, int unit);
  bool make_room(const Lock& held, std::int64_t elements, bool for_prefetch);
  void prefetch(const Lock& held);
  void drop(const Lock& held, int unit);
  void refuse_lost_write(const Lock& held, int unit) const;
  void refuse_second_thread(const Lock& held);
  void fail(const Lock& held, std::exception_ptr cause) noexcept;

  const Layout& layout_;
  ShardHome& shards_;
  Rounds& rounds_;
  std::shared_ptr<Communicator> gather_;
  std::shared_ptr<Ledger> ledger_;
  ResidencyLimits limits_;
  tiers::DeviceStream copies_;  // from shards off the device to it, beside the computation

  mutable std::mutex
      mutex_;  // guards everything below; held across a gather, since the order of gathers is what it keeps
  std::vector<State> states_;
  std::deque<int> mapped_order_;       // oldest first, persistent units not among them
  std::int64_t live_ = 0, ahead_ = 0;  // elements mapped or gathering; elements gathering or mapped but untouched
  FaultOrder order_;
  std::thread::id operator_thread_;  // of the operators running now
  int running_operators_ = 0;
  std::exception_ptr failure_;
  std::int64_t faults_ = 0, prefetched_ = 0;
  FaultObserver observer_;  // last: no touch arrives before the state above stands
};

}  // namespace ballast
