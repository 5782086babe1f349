#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace ballast::testing {

/// A gate before the updates of one rank, which step() leaves to the rank's lane: a test decides when they run, or that
/// one fails. Open at first.
class LaneGate {
 public:
  ~LaneGate();  // opens

  /// Body of a LaneHook. Gradients and reads of states pass freely.
  void pass(std::string_view what);

  void close() { let(0); }
  /// Lets this many updates through, then closes.
  void let(int updates);
  void open();
  /// In a moment, from another thread: whoever doesn't wait for an update sees that it hasn't run.
  void open_soon();
  /// The next update throws a std::runtime_error.
  void fail_next(const std::string& text);
  /// Updates so far.
  int passed() const;

 private:
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable opened_;
  bool is_open_ = true;
  int admitted_ = 0;  // while closed
  int passed_ = 0;
  std::string failure_;
  std::thread opener_;
};

}  // namespace ballast::testing
