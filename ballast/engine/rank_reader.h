#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/checkpoint/checkpoint_reader.h"
#include "ballast/engine/load_plan.h"
#include "ballast/optim/optimizer_states.h"
#include "ballast/params/param_store.h"
#include "ballast/tiers/host_arena.h"

namespace ballast {

/// What a rank keeps of a unit, on the host: the optimizer's states, or a frozen unit's parameters, in their dtype, as
/// if they were master weights.
using UnitValues = std::vector<SpareStates>;

/// Reads what this rank keeps out of a checkpoint, into memory beside what is in use. What is returned has its values
/// when complete() returns. Errors: IoError.
class RankReader {
 public:
  /// plan: of the reader's manifest. with_optimizer: else moments are as they are now.
  RankReader(ckpt::CheckpointReader& reader, const LoadPlan& plan, OptimizerStates& optimizer, ParamStore& params,
             bool with_optimizer);

  /// Gets a second file for states on disk, where all of them come and there is room for one.
  void prepare(const Layout& layout);
  /// Of what read() returns for all units.
  std::int64_t bytes(const Layout& layout) const;
  /// Gets memory for that in advance, in huge pages: small ones would take as long to get as the data. What outlives
  /// the load lies apart from what doesn't. All units are then to be taken over.
  void reserve(const Layout& layout);

  /// Reads all states that lie on disk, into that file. keep: the weights among them, for read().
  void refill(const Layout& layout, bool keep);
  /// That file takes the first one's place.
  void place_refill() {
    if (refill_) optimizer_.take_over(*refill_);
  }
  /// What the checkpoint hasn't is as it is now. Empty where it has nothing of the unit. Of states that refill() reads
  /// the weights alone.
  UnitValues read(const Unit& unit);
  /// A tensor of the checkpoint, whole.
  at::Tensor read_whole(const ckpt::Pieces& pieces, c10::ScalarType dtype, at::IntArrayRef shape);
  void complete();

 private:
  struct Bytes {
    std::int64_t lasting = 0, passing = 0;
  };
  const ckpt::ParameterRecord* record_of(const Slot& slot) const;
  bool has_any_of(const Unit& unit) const;
  bool covers(const Unit& unit) const;
  Range kept(const Unit& unit) const;
  Range in_unit(const Unit& unit, const SpareStates& part) const;
  UnitValues shape_of(const Unit& unit) const;
  Bytes bytes_by_life(const Layout& layout) const;
  at::Tensor new_memory(const Unit& unit, const SpareStates& part);
  void fill(const Unit& unit, const SpareStates& part);
  void copy_current(const Unit& unit, const SpareStates& part);
  void clear_padding(const Unit& unit, const SpareStates& part) const;
  void read_state(const ckpt::ParameterRecord& record, int array, Range elements, const at::Tensor& to);
  void read_weights(const ckpt::ParameterRecord& record, Range elements, const at::Tensor& to);
  void read_later(const ckpt::Pieces& pieces, c10::ScalarType dtype, Range elements, const at::Tensor& to);

  ckpt::CheckpointReader& reader_;
  const LoadPlan& plan_;
  OptimizerStates& optimizer_;
  ParamStore& params_;
  const bool with_optimizer_;
  const std::vector<std::string> keys_;                   // of the moments
  std::vector<std::pair<at::Tensor, at::Tensor>> later_;  // what is being read, and where it goes in another type
  bool may_last_ = false;
  std::unique_ptr<ChunkRefill> refill_;
  std::vector<UnitValues> weights_;  // by unit: what refill() has kept
  std::optional<tiers::HostArena> lasting_, passing_;
};

}  // namespace ballast
