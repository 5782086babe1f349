#pragma once

#include <cstdint>

namespace ballast {

/// Remembers the process that made it. A forked child has a copy of every object and none of the threads behind them,
/// so that it would wait for those for ever.
class ProcessMark {
 public:
  ProcessMark() noexcept : made_in_(current()) {}
  /// False in a forked child. No system call: operators ask.
  bool is_here() const noexcept { return made_in_ == current(); }

 private:
  static std::uint64_t current() noexcept;
  std::uint64_t made_in_;
};

}  // namespace ballast
