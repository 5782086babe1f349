#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ballast/base/error.h"

namespace ballast {

/// Notices writes to the module's copy of a unit's parameters where the next values come from another copy (a shard,
/// fp32 master weights): such a write would vanish. Version counters tell of every operator on the parameter itself;
/// what passes them by (p.data(), p.variable_data()) must be marked by somebody who sees it.
class WriteWatch {
 public:
  WriteWatch() = default;  // of nothing
  /// By slot: the tensors that share the parameter's memory. Their values now are the engine's.
  explicit WriteWatch(std::vector<std::vector<at::Tensor>> slots);

  /// The values of this slot, or of all, are the engine's as they are now.
  void accept(std::size_t slot);
  void accept_all();
  /// Somebody wrote to the slot without its version counter. Means nothing to a watch of nothing.
  void mark(std::size_t slot);
  /// The first slot that was written since it was accepted.
  std::optional<std::size_t> find() const;

 private:
  std::uint32_t version(std::size_t slot) const;

  std::vector<std::vector<at::Tensor>> slots_;
  std::vector<std::uint32_t> versions_;
  std::vector<bool> marked_;
};

/// What a caller is told, by the name of the parameter that was written and the rank on which.
UseError lost_write(const std::string& parameter, int rank);

}  // namespace ballast
