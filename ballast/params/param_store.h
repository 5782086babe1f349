#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/comm/communicator.h"
#include "ballast/layout/layout.h"
#include "ballast/params/residency.h"
#include "ballast/params/shard_home.h"
#include "ballast/params/update_gate.h"
#include "ballast/params/write_watch.h"
#include "ballast/tiers/device_span.h"

namespace ballast {

/// How a stage holds parameters. The one difference between stages 0, 1-2 and 3 here.
struct ParamPolicy {
  bool updates_whole = false;  // stage 0: every rank updates all of a unit, nothing is gathered afterwards
  bool sharded = false;        // stage 3: a rank keeps its shard, the rest faults in
  ShardPolicy shards;
  ResidencyLimits limits;
  std::int64_t persistent_unit = 0;    // units of at most this many elements stay gathered ...
  std::int64_t persistent_total = 0;   // ... until these are used up
  std::int64_t publish_in_flight = 0;  // elements of updated parameters being gathered at once, at most
};

/// The compute-dtype parameters: one flat buffer a unit, the module's parameters views of it. Owned by the engine.
class ParamStore {
 public:
  /// Called once a unit with its values in the dtype in which the module came ([padded], zeros between slots).
  using OriginalSink = std::function<void(const Unit&, const at::Tensor& original)>;

  /// Initial values of these parameters (by index) of a unit, each in its shape; rank 0's count, others may give none.
  using Materialize = std::function<std::vector<at::Tensor>(const std::vector<int>& parameters)>;

  /// Collective. parameters: by parameter index, the module's tensors, more than one where several share the
  /// parameter's memory; their data moves into the flat buffers on `device`, unit by unit, rank 0's values becoming
  /// everybody's. lane: where updates run beside the computation; null: none do. materialize: is asked for
  /// the values of tensors on the meta device, once a unit on all ranks; without it such tensors are a UseError.
  ParamStore(const Layout& layout, const ParamPolicy& policy, std::vector<std::vector<at::Tensor>> parameters,
             c10::Device device, std::shared_ptr<Communicator> gather, Rounds& rounds, std::shared_ptr<Ledger> ledger,
             tiers::HostLane* lane, const OriginalSink& original, const Materialize& materialize = {});

  /// Without restore() before it: sharded parameters stay empty, with ordinary storages. Talks to nobody.
  ~ParamStore();
  ParamStore(const ParamStore&) = delete;
  ParamStore& operator=(const ParamStore&) = delete;

  /// What this rank's update of the unit writes: compute dtype, [padded] at stage 0, else [shard].
  Range owned_range(int unit) const;
  /// body(these values), kReplace: undefined before. Who writes there but the unit's update on the lane calls
  /// before_write() first. Throws IoError where they lie on disk.
  void with_owned(int unit, ShardHome::Access access, const std::function<void(const at::Tensor&)>& body);
  /// The same where they rest in memory that stays theirs.
  const at::Tensor& owned(int unit) const;

  /// Its owned values are new: brings them into view of the module on all ranks and bumps the version counters of the
  /// parameters that were updated (by parameter index). Collective; finish_publish waits. update: writes them, on the
  /// lane; empty: they are written. With a lane this returns before, and the first operator that needs the unit waits;
  /// a frozen unit, which no update changes, doesn't use the lane, so nothing else may be on it then.
  void publish(int unit, const std::vector<bool>& updated, std::function<void()> update = {});
  void finish_publish();
  /// Collectives that other threads launch must come after those that the lane launches, on every rank: two NCCL
  /// communicators used in different orders may wait for each other. Waits until the lane has launched all it owes.
  void finish_launching();
  /// Waits until its owned values and, where it is whole, the module's copy are the newest.
  void settle(int unit);
  /// Waits until what the calling thread writes to the unit's owned values from now on is the last word: the update
  /// under way would come over it, and a copy of a shard in host memory that the device still owes would carry it to an
  /// operator from before.
  void before_write(int unit);
  /// Takes the parameters that lie on the device to host memory, or back. An operator that needs whole parameters
  /// meanwhile brings them back itself; shards are read where they are. rebind(unit): owned(unit) is another tensor
  /// now.
  void take_away(const std::function<void(int unit)>& rebind);
  void bring_back(const std::function<void(int unit)>& rebind);
  /// publish() gathers the unit at once, so that its update should come first.
  bool persistent(int unit) const { return residency_ && residency_->persistent(unit); }

  /// The module's view of one parameter; readable only while its unit is held where it is sharded.
  const at::Tensor& parameter(int index) const { return tensors(index).front(); }
  /// All tensors that are this parameter: itself, then others that share its memory.
  const std::vector<at::Tensor>& tensors(int index) const { return parameters_[static_cast<std::size_t>(index)]; }
  /// [padded]; as above.
  const at::Tensor& full(int unit) const { return units_[static_cast<std::size_t>(unit)].full; }
  void hold(int unit);
  void let_go(int unit) noexcept;
  /// This parameter's values in full(unit) (held) are new, and equal on all ranks: takes this rank's part of them over
  /// and bumps the version counters, so that graphs from before refuse to run their backward on every rank.
  void adopt(int parameter);

  /// The unit's values are kept elsewhere too (fp32 masters), and updates start from those: from now on writes to the
  /// module's copy count as lost. Sharded units need no such word.
  void watch_writes(int unit);
  /// A parameter of the unit that was written in place outside gathered(), if there is one. (A write past the version
  /// counter, like p.data().fill_(), is only seen where units are sharded.)
  std::optional<int> find_lost_write(int unit) const;
  /// UseError if there is one in any unit.
  void refuse_lost_writes() const;
  /// UseError if the module's parameters are no longer those that the engine trains: their data was exchanged
  /// (module->to(dtype), set_data), or a frozen one requires grad now. An update would be lost without a word.
  void refuse_changed_module() const;
  /// The engine has ended with this error: sharded parameters that aren't there throw it.
  void refuse(std::exception_ptr cause) noexcept {
    if (residency_) residency_->refuse(std::move(cause));
  }
  /// Throws what made an operator fail in a parameter fault, if one did.
  void rethrow_failure() const;
  std::exception_ptr failure() const;  // or null
  const Residency* residency() const { return residency_.get(); }

  /// Full, ordinary parameters again, in host memory where shards rested there (the device may not hold them all).
  /// Collective.
  void restore();

 private:
  struct UnitParams {
    at::Tensor full;   // its storage is the module's, and unmapped now and then
    at::Tensor whole;  // [padded], the memory of full where it is not sharded
    at::Tensor owned;  // this rank's part of that
    WriteWatch watch;  // where the unit is watched and not sharded (residency watches there)
    int holds = 0;     // by gathered()
    bool watched = false;
    Ledger::Entry bytes;
  };
  struct Publishing {
    const Unit* unit;
    PendingCollective gather;
    tiers::DeviceMark launched;
  };
  std::vector<std::vector<at::Tensor>> members(const Unit& unit) const;
  void publish_on_lane(int unit, bool travels, std::function<void()> update);
  Publishing start_publishing(int unit);
  static void finish(Publishing& publishing);
  void new_version(const Unit& unit, std::size_t slot);
  void move_shards(c10::Device to, Tier tier, const std::function<void(int unit)>& rebind);
  void alias_whole(int unit);
  void give_back_on_host();
  void take_over(const Unit& unit, c10::Device device, const OriginalSink& original, const Materialize& materialize,
                 std::int64_t& persistent_left);
  std::vector<at::Tensor> initial_values(const Unit& unit, const Materialize& materialize) const;

  const Layout& layout_;
  ParamPolicy policy_;
  std::vector<std::vector<at::Tensor>> parameters_;
  std::shared_ptr<Communicator> gather_;
  std::shared_ptr<Ledger> ledger_;
  tiers::HostLane* lane_;
  std::unique_ptr<ShardHome> shards_;     // only where sharded
  std::unique_ptr<Residency> residency_;  // the same
  std::unique_ptr<UpdateGate> gate_;      // only with a lane, where not sharded
  std::vector<UnitParams> units_;
  std::deque<Publishing> publishing_;
  std::int64_t publishing_elements_ = 0;
  tiers::HostLane::Ticket last_on_lane_ = 0;  // that launches a collective
};

}  // namespace ballast
