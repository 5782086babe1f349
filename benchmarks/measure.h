#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// What the benchmarks share: a clock, medians, turns and flags.
namespace ballast::bench {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline double seconds_of(const std::function<void()>& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

/// Of a non-empty list; the upper one of two middle values.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Two kinds of work that took turns: median seconds of each, and the median over the turns of base / other, the speed
/// of `other` in units of base's.
struct Turns {
  double base, other, speed;
};

/// Every turn runs both, now one first and now the other, so that what else the machine does hits both alike.
inline Turns take_turns(int turns, const std::function<void()>& base, const std::function<void()>& other) {
  std::vector<double> bases, others, speeds;
  for (int turn = 0; turn < turns; ++turn) {
    const bool base_first = turn % 2 == 0;
    const double first = seconds_of(base_first ? base : other);
    const double second = seconds_of(base_first ? other : base);
    bases.push_back(base_first ? first : second);
    others.push_back(base_first ? second : first);
    speeds.push_back(bases.back() / others.back());
  }
  return {median(bases), median(others), median(speeds)};
}

/// Command line of "--name value" pairs. Read every flag, then finish(): it ends the program with the list of flags on
/// --help or on a flag that nobody read.
class Flags {
 public:
  Flags(int argc, char** argv, std::string about);
  std::int64_t number(const std::string& name, std::int64_t fallback, const std::string& meaning);
  std::string text(const std::string& name, const std::string& fallback, const std::string& meaning);
  void finish();

 private:
  struct Given {
    std::string name, value;
    bool read = false;
  };
  std::string about_, list_;
  std::vector<Given> given_;
  bool help_ = false;
};

}  // namespace ballast::bench
