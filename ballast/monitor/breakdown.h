#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace ballast::monitor {

/// Wall-clock time by phase of a step. A device runs behind the host, so phases are only told apart where the device is
/// waited for at each boundary; that costs overlap, and is why a breakdown is asked for and not always on.
class Breakdown {
 public:
  /// wait: called at both ends of a phase; empty: the host's time alone (a CPU device needs no waiting).
  explicit Breakdown(std::vector<std::string> phases, std::function<void()> wait = {});

  /// Counts the time of its life to one phase. Not nested: time counted twice would make the sum exceed the whole.
  class Timer {
   public:
    /// owner: null where nobody asked for a breakdown; then the timer does nothing.
    Timer(Breakdown* owner, std::size_t phase);
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;
    ~Timer();

   private:
    Breakdown* owner_;
    std::size_t phase_;
    std::chrono::steady_clock::time_point start_;
  };

  /// Seconds of each phase since the last take().
  std::vector<double> take();
  /// "data 0.3 s (2%), forward 5.1 s (40%), ...": seconds since the start and the share of their sum.
  std::string summary() const;
  /// Of `whole` seconds; what is in no phase is named `rest`.
  std::string summary(double whole, const std::string& rest) const;

 private:
  std::vector<std::string> phases_;
  std::function<void()> wait_;
  std::vector<double> seconds_, total_;
};

/// "5.1 s (40%)".
std::string format_share(double seconds, double whole);

}  // namespace ballast::monitor
