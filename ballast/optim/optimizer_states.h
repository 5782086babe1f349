#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/config/config.h"
#include "ballast/grads/host_sums.h"
#include "ballast/layout/layout.h"
#include "ballast/optim/chunk_refill.h"
#include "ballast/optim/state_chunks.h"
#include "ballast/optim/upload_ring.h"
#include "ballast/tiers/bounce_buffer.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

/// How a stage and a placement treat optimizer states.
struct OptimizerPolicy {
  bool whole = false;  // stage 0: every rank keeps all of a unit's states, else its shard of them
  Tier tier = Tier::kDevice;
  double offloaded = 1;                        // the share of the states that lies on `tier`, the rest on the device
  bool masters_apart = false;                  // also of fp32 parameters: they don't rest on the device
  bool pin_memory = false;                     // buffers that are copied to a device
  std::int64_t chunk = std::int64_t{4} << 20;  // elements of a chunk off the device at most; a multiple of kShardAlign
  tiers::SwapOptions swap;                     // of Tier::kNvme
};

/// Where each unit's optimizer states lie, and with them its update: the device for the units that the next forward
/// needs first, up to the share that stays there, `policy.tier` for the rest, whose updates then run under the forward.
std::vector<Tier> place_states(const Layout& layout, const OptimizerPolicy& policy);

/// A part of a unit's states off the device that is updated, read and written as one.
struct StateChunk {
  int unit;
  Range range;  // of the elements whose states the rank keeps
};
/// All chunks, in the order of their updates. tier: by unit, of place_states.
std::vector<StateChunk> cut_states(const Layout& layout, const OptimizerPolicy& policy, const std::vector<Tier>& tier);

/// The states of a run of elements: fp32 [range.size()] each, the master weights first, then those that keys() names.
struct StateRun {
  Range range;  // of what the rank keeps of a unit
  std::vector<at::Tensor> arrays;
};

/// States on their way to who asked for them, from where a thread of their own brings them.
class StateRead {
 public:
  StateRead() = default;
  /// Waits. Throws IoError.
  std::vector<StateRun> get() {
    if (lane_ != nullptr) lane_->wait(ticket_);
    return std::move(*runs_);
  }

 private:
  friend class OptimizerStates;
  std::shared_ptr<std::vector<StateRun>> runs_ = std::make_shared<std::vector<StateRun>>();
  tiers::HostLane* lane_ = nullptr;  // null: they are there
  tiers::HostLane::Ticket ticket_ = 0;
};

/// Memory for some of the states of a run of elements, beside what is in use.
struct SpareStates {
  Range range;                // of what the rank keeps of a unit
  int first = 0, arrays = 0;  // which, counted as StateRun's
  bool lasts = false;         // take_over() keeps the memory; else it copies from it
  at::Tensor memory;          // fp32 [numel()] on the host: one array behind the other
  bool placed = false;        // the states have these values already: take_over() leaves them alone

  std::int64_t numel() const { return arrays * range.size(); }
  at::Tensor array(int index) const { return memory.narrow(0, (index - first) * range.size(), range.size()); }
};

/// One update's common values.
struct UpdateStep {
  double grad_factor = 1;           // the gradient is sum * grad_factor
  std::vector<double> lr;           // by parameter group
  const std::vector<bool>& active;  // by parameter: the others are skipped, step count included
};

/// fp32 master weights and moments of this rank's part of every trainable unit, and the update. One path for all stages
/// and placements: what differs is which elements are kept and where they lie.
///
/// Threads: the caller's prepares updates and runs those of units on the device; the host lane runs the others, and all
/// that touches their states happens there.
class OptimizerStates {
 public:
  /// Callers' name of a parameter's update count, which stands next to keys().
  static constexpr const char* kStepKey = "step";

  /// tier: by unit, of place_states. lane: null where all lie on the device.
  OptimizerStates(const Layout& layout, const OptimizerConfig& config, const OptimizerPolicy& policy,
                  std::vector<Tier> tier, int rank, c10::Device device, tiers::HostLane* lane,
                  std::shared_ptr<Ledger> ledger);

  /// Takes the unit's initial values ([padded], any dtype), before they are rounded to the compute dtype.
  void set_initial(const Unit& unit, const at::Tensor& original);
  /// The masters are apart from the parameters: a write to these alone would be lost. Else the parameters, fp32 and on
  /// the device like the states, are the master weights themselves: bind_masters() wants them ([kept_range]).
  bool masters_apart(int unit) const { return !at(unit).master_is_bound; }
  void bind_masters(int unit, at::Tensor parameters) { at(unit).master = std::move(parameters); }
  bool on_device(int unit) const { return at(unit).tier == Tier::kDevice; }
  bool on_disk(int unit) const { return at(unit).tier == Tier::kNvme; }

  /// A run of elements (of the kept range) that one call updates: same group, same step count, buffers alike.
  struct Segment {
    Range range;
    int group;
    std::int64_t step;
    bool fresh;
  };
  /// One unit's update: a value, so that it may run later than the step() that decided on it.
  struct Update {
    int unit;
    LandedSum sum;  // [kept_range]
    std::vector<Segment> segments;
    std::vector<double> lr;
    double grad_factor;
    bool all;  // no parameter of the unit is skipped
  };
  /// Counts a step for each active parameter. sum: not needed after run().
  Update prepare(int unit, LandedSum sum, const UpdateStep& step);
  /// Updates masters, moments and `parameters`: the unit's, in the compute dtype [kept_range]. Off the device: on the
  /// host lane's thread.
  void run(const Update& update, const at::Tensor& parameters);
  /// Takes the states that lie on the device to host memory or back, bit for bit. Masters that are the parameters
  /// themselves go with these. Nothing else may be called in between. tier: which of the two `to` is.
  void move(c10::Device to, Tier tier);
  /// Ends what the host lane's thread drives, on that thread.
  void close() { chunks_.reset(); }

  /// Which elements of the unit this rank keeps.
  Range kept_range(int unit) const;
  /// Names of the states besides the master weights: "exp_avg", "exp_avg_sq", "momentum_buffer".
  std::vector<std::string> keys() const;
  /// UseError unless the key is "" or one of keys().
  void check_key(const std::string& key) const { (void)array_of(key); }
  /// fp32 [kept_range], on the device or the host; key "" (master weights) or one of keys(). UseError for another key.
  /// Waits for updates under way. Off the device it is a copy.
  at::Tensor read(int unit, const std::string& key);
  /// Replaces elements of the kept range: values [elements.size()], taken as fp32.
  void write(int unit, const std::string& key, Range elements, const at::Tensor& values);
  /// Begins to read all states of these elements of the kept range, in one pass over what lies on disk. Views where
  /// they lie in memory, which the next update changes; else copies. memory: fp32, where copies go, (1 + keys) x
  /// elements at least; undefined: new memory.
  StateRead read_all(int unit, Range elements, const at::Tensor& memory = {});
  /// Spares for all states of the unit, their memory still to be given: what take_over() then puts in the place of the
  /// unit's states. may_last: the spares of all units are taken over, so that none of the memory in use remains.
  std::vector<SpareStates> spares(int unit, bool may_last) const;
  void take_over(int unit, const std::vector<SpareStates>& spares, tiers::BounceBuffer& bounce);
  /// A second file for all states on disk, as large as the first. Null where there are none, or the disk has no room
  /// for it, which the log says. Nothing else may be called until the refill is taken over or gone.
  std::unique_ptr<ChunkRefill> make_refill();
  /// As ChunkRefill::run(), with a spare for each chunk.
  void run(ChunkRefill& refill, const std::function<void(int unit, const SpareStates& spare)>& begin,
           const std::function<void()>& complete);
  /// What run() has filled takes the place of all states on disk.
  void take_over(ChunkRefill& refill);
  /// The parameter's moments were written: SGD's next update builds on its buffer instead of starting it with the
  /// gradient, as torch.optim does where a buffer is there.
  void moments_written(int parameter) { fresh_[static_cast<std::size_t>(parameter)] = false; }

  /// Updates of the parameter so far; equal on all ranks. Adam's bias corrections follow from it.
  std::int64_t steps(int parameter) const { return steps_[static_cast<std::size_t>(parameter)]; }
  void set_steps(int parameter, std::int64_t steps) { steps_[static_cast<std::size_t>(parameter)] = steps; }
  /// Nothing has been put into the parameter's moments yet: SGD's buffer will start as the first gradient.
  bool fresh(int parameter) const { return fresh_[static_cast<std::size_t>(parameter)]; }
  void set_fresh(int parameter, bool fresh) { fresh_[static_cast<std::size_t>(parameter)] = fresh; }
  int groups() const { return 1 + static_cast<int>(config_.groups.size()); }

  /// fp32 values kept per element besides the master weight.
  static int moments(const OptimizerConfig& config);

 private:
  struct UnitStates {
    Tier tier = Tier::kDevice;
    bool master_is_bound = false;
    at::Tensor master, first, second;  // on the device
    int first_chunk = 0, chunks = 0;   // off it
    Ledger::Entry bytes;
  };
  /// What one pass on the host works on: n elements.
  struct Pass {
    float *master, *first, *second;
    at::Tensor grad, out;  // out: undefined where the masters are the parameters
    std::int64_t n;
  };

  UnitStates& at(int unit) { return units_[static_cast<std::size_t>(unit)]; }
  const UnitStates& at(int unit) const { return units_[static_cast<std::size_t>(unit)]; }
  /// Which of a chunk's arrays the key names: 0 masters, 1 and 2 the moments. UseError for another key.
  int array_of(const std::string& key) const;
  void make_chunks();
  /// body(floats of the chunk's array 0, its stride to the next array, the chunk's range) for each of the unit's chunks
  /// that has some of these elements, on the host lane's thread.
  void for_chunks(int unit, StateChunks::Access access, const std::function<void(float*, std::int64_t, Range)>& body,
                  Range elements = {0, std::numeric_limits<std::int64_t>::max()});
  /// The arrays of a unit on the device, in the order of a chunk's.
  std::vector<at::Tensor*> arrays_of(UnitStates& unit) const;
  int arrays() const { return 1 + moments(config_); }
  const OptimizerHyper& hyper(int group) const;
  void run_on_host(const Update& update, const Segment& segment, const Pass& pass);
  void run_on_device(const Update& update, const Segment& segment, at::Tensor grad);
  void run_chunk(const Update& update, Range range, float* master, const at::Tensor& parameters);

  const Layout& layout_;
  OptimizerConfig config_;
  OptimizerPolicy policy_;
  int rank_;
  c10::Device device_;
  tiers::HostLane* lane_;
  std::shared_ptr<Ledger> ledger_;
  std::vector<UnitStates> units_;
  std::vector<std::int64_t> steps_;  // by parameter: updates so far
  std::vector<bool> fresh_;          // by parameter: nothing has been put into its moments yet
  std::vector<StateChunk> cuts_;     // by chunk
  std::unique_ptr<StateChunks> chunks_;
  std::optional<UploadRing> uploads_;
};

}  // namespace ballast
