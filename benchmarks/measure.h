#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
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

/// Seconds on the clock, and of all the process's threads on processors: the second tells the work apart from the
/// waiting for a machine that is busy with other things.
struct Cost {
  double seconds, cpu;
};

inline Cost cost_of(const std::function<void()>& work) {
  const auto cpu = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
  };
  const double before = cpu();
  const Stopwatch watch;
  work();
  const double seconds = watch.seconds();
  return {seconds, cpu() - before};
}

/// Of a non-empty list; the upper one of two middle values.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Two kinds of work that took turns: median cost of each, and medians over the turns of base / other, which is the
/// speed of `other` in units of base's.
struct Turns {
  Cost base, other, speed;
};

/// Every turn runs both, now one first and now the other, so that what else the machine does hits both alike.
inline Turns take_turns(int turns, const std::function<void()>& base, const std::function<void()>& other) {
  std::vector<double> seconds[3], cpu[3];
  for (int turn = 0; turn < turns; ++turn) {
    const bool base_first = turn % 2 == 0;
    const Cost first = cost_of(base_first ? base : other), second = cost_of(base_first ? other : base);
    const Cost b = base_first ? first : second, o = base_first ? second : first;
    seconds[0].push_back(b.seconds);
    seconds[1].push_back(o.seconds);
    seconds[2].push_back(b.seconds / o.seconds);
    cpu[0].push_back(b.cpu);
    cpu[1].push_back(o.cpu);
    cpu[2].push_back(b.cpu / o.cpu);
  }
  return {
      {median(seconds[0]), median(cpu[0])}, {median(seconds[1]), median(cpu[1])}, {median(seconds[2]), median(cpu[2])}};
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
