#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "ballast/checkpoint/manifest.h"
#include "ballast/checkpoint/safetensors.h"
#include "ballast/layout/layout.h"

namespace ballast {

/// A run of elements of one parameter that one rank writes as one tensor.
struct SavedPiece {
  int parameter;
  std::size_t key;   // index into SavePlan::keys of its unit's kind
  Range elements;    // of the parameter
  Range flat;        // of its unit's buffer
  std::string name;  // in the file
};

/// A run of a unit's elements of which one rank writes all arrays before those of the next run, so that it never has to
/// hold more of them.
struct SavedPart {
  Range flat;                      // of the unit's buffer
  std::vector<SavedPiece> pieces;  // array by array
};

/// Names of what is kept of a parameter, in the order in which a unit's arrays are written.
struct SavedKeys {
  std::vector<std::string> trainable;  // "master", the optimizer's states, "gradient" where a window is kept
  std::vector<std::string> frozen{"param"};
  const std::vector<std::string>& of(const Unit& unit) const { return unit.trainable ? trainable : frozen; }
};
inline constexpr const char* kMasterKey = "master";
inline constexpr const char* kParamKey = "param";
inline constexpr const char* kGradientKey = "gradient";

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Which rank writes what: of every unit its shard, in every stage; rank 0 also the buffers; every rank the states of
/// its random generators. A pure function of its arguments.
class SavePlan {
 public:
  /// active: by parameter, whether it has a gradient to keep (where keys hold that). buffers, generators: names and
  /// shapes, the generators' as bytes.
  SavePlan(const Layout& layout, SavedKeys keys, std::vector<bool> active, NamedTensors buffers,
           NamedTensors generators);

  const SavedKeys& keys() const { return keys_; }
  const NamedTensors& buffers() const { return buffers_; }
  const NamedTensors& generators() const { return generators_; }
  /// What the rank writes of a unit, in order.
  std::vector<SavedPart> parts(const Unit& unit, int rank) const;
  /// The rank's file: pieces by unit, then buffers, then generators. UseError where two names fall together.
  std::vector<ckpt::TensorSpec> tensors(int rank) const;
  /// Adds parameters, buffers and generators with their pieces, checksums left out.
  void describe(ckpt::Manifest& manifest) const;

 private:
  const Layout& layout_;
  SavedKeys keys_;
  std::vector<bool> active_;
  NamedTensors buffers_, generators_;
};

}  // namespace ballast
