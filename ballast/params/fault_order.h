#pragma once

#include <cstdint>
#include <unordered_map>

namespace ballast {

/// Predicts which unit faults next from the last time the same two faulted in a row. Two, because forward and backward
/// pass the same unit in opposite directions. Learns from the first pass, follows any window length, evaluation in
/// between and a changed order by itself, and depends on the sequence of faults alone, so ranks predict alike.
class FaultOrder {
 public:
  struct State {
    int before = -1, last = -1;
  };

  void record(int unit) {
    next_[key(now_)] = unit;
    now_ = {now_.last, unit};
  }
  State now() const { return now_; }
  /// The unit that followed this state last time, -1 if it is new.
  int predict(State state) const {
    const auto found = next_.find(key(state));
    return found == next_.end() ? -1 : found->second;
  }

 private:
  static std::uint64_t key(State state) {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(state.before)) << 32) |
           static_cast<std::uint32_t>(state.last);
  }
  State now_;
  std::unordered_map<std::uint64_t, int> next_;
};

}  // namespace ballast
