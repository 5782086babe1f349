#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

/// A parameter as the module has it, before any placement.
struct ParameterInfo {
  std::vector<std::string> names;  // dotted; more than one where the module ties it, the first is the one in messages
  std::vector<std::int64_t> shape;
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;          // of the module as it was handed over
  c10::ScalarType compute_dtype = c10::kFloat;  // of the tensor that forward and backward see
  bool trainable = true;
  std::string unit;   // dotted name of the module that its unit belongs to
  bool leaf = false;  // that module is declared a leaf: which of its children run depends on data
  int group = 0;      // optimizer parameter group

  const std::string& name() const { return names.front(); }
};

/// A parameter's place in its unit's flat buffer: elements [offset, offset + numel).
struct Slot {
  int parameter;  // index into Layout::parameters
  std::int64_t offset, numel;
};

/// Elements [begin, end) of a flat buffer.
struct Range {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
};
Range intersect(Range a, Range b);

/// Parameters that are gathered and reduced together: one flat buffer of `padded` elements, `shard` of them a rank.
struct Unit {
  int id = 0;
  std::string name;
  c10::ScalarType dtype = c10::kFloat, compute_dtype = c10::kFloat;
  bool trainable = true, leaf = false;
  std::vector<Slot> slots;
  std::int64_t numel = 0;   // of the parameters themselves
  std::int64_t padded = 0;  // world * shard
  std::int64_t shard = 0;   // equal on all ranks, a multiple of kShardAlign
  Range shard_of(int rank) const { return {rank * shard, (rank + 1) * shard}; }
  /// Index of the slot that holds this element of the flat buffer; nothing for padding.
  std::optional<std::size_t> slot_at(std::int64_t element) const;
};

/// Every slot starts at a multiple of this many elements, so that a view of half-precision elements starts on a cache
/// line and matrix kernels take their aligned path.
inline constexpr std::int64_t kSlotAlign = 32;
inline constexpr std::int64_t kShardAlign = 64;

/// The one flat layout of all stages and placements: which parameter lies where in which unit. A pure function of the
/// parameters and the world size; equal on all ranks.
struct Layout {
  int world = 1;
  std::vector<ParameterInfo> parameters;
  std::vector<Unit> units;

  struct Place {
    int unit, slot;
  };
  std::vector<Place> places;  // by parameter

  const Unit& unit_of(int parameter) const {
    return units[static_cast<std::size_t>(places[static_cast<std::size_t>(parameter)].unit)];
  }
  const Slot& slot_of(int parameter) const;
  /// Index of the parameter with this dotted name, tied names included. UseError with the nearest name if there is
  /// none.
  int find(const std::string& name) const;
};

/// Groups parameters into units by (unit, dtype, compute dtype, trainable) in order of first appearance, which is
/// forward order for a module that declares its children in the order in which it runs them.
Layout make_layout(std::vector<ParameterInfo> parameters, int world);

}  // namespace ballast
