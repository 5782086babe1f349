#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>

/// What ran when, for a picture of overlap: spans on named lanes, written as a Chrome trace (chrome://tracing,
/// Perfetto). One recorder a process; off, a span costs one relaxed load.
namespace ballast::trace {

using Clock = std::chrono::steady_clock;

namespace detail {
inline std::atomic<bool> on{false};
}

/// Relaxed: a span that a thread begins while another turns the recorder on may be missing, nothing else depends on it.
inline bool on() noexcept { return detail::on.load(std::memory_order_relaxed); }

/// Starts to record, from nothing.
void start();
/// Stops, and writes what was recorded, lanes in the order of their first span. rank: the process's number in the
/// trace. Throws IoError.
void write(const std::filesystem::path& file, int rank);

void add(const char* lane, std::string name, Clock::time_point begin, Clock::time_point end);

/// The time from its construction to its end.
class Span {
 public:
  Span(const char* lane, const char* name) : lane_(on() ? lane : nullptr), name_(name) {
    if (lane_ != nullptr) begin_ = Clock::now();
  }
  ~Span() {
    if (lane_ != nullptr) add(lane_, name_, begin_, Clock::now());
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  const char* lane_;  // null: not recorded
  const char* name_;
  Clock::time_point begin_;
};

}  // namespace ballast::trace
