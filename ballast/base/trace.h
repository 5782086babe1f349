#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

/// What ran when, for a picture of overlap: spans on lanes, written as a Chrome trace (chrome://tracing, Perfetto). One
/// recorder a process; off, a span costs one relaxed load.
namespace ballast::trace {

using Clock = std::chrono::steady_clock;

/// In the order in which they are shown.
enum class Lane : std::uint8_t {
  kSteps,        // whole windows of a run
  kCaller,       // the engine's calls, as the thread that makes them sees them
  kCallerWaits,  // what that thread waits for in them
  kCompute,      // forward, backward, updates on the device: the device's time
  kGather,       // a unit's parameters, from the launch to where they may be used
  kReduce,       // a unit's gradients, from the launch until their sum has landed
  kCopies,       // between device and host, both ways
  kHostAdd,      // gradients added on the host
  kHostUpdate,   // optimizer steps on the host
  kHostWaits,    // what the host's side of the work waits for
  kDisk,         // reads and writes of chunks
};

namespace detail {
inline std::atomic<bool> on{false};
}

/// Relaxed: a span that a thread begins while another turns the recorder on may be missing, nothing else depends on it.
inline bool on() noexcept { return detail::on.load(std::memory_order_relaxed); }

/// 60 MB or so.
inline constexpr std::size_t kMostSpans = 500'000;

/// Starts to record, from nothing. What comes after `most` spans is only counted.
void start(std::size_t most = kMostSpans);
/// Spans that begin from now on are not recorded; those before are kept for write().
void stop() noexcept;
/// When the recorder was started last.
Clock::time_point started() noexcept;
/// Stops, and writes what was recorded. rank: the process's number in the trace. Where spans of one lane overlap
/// without one holding the other, the lane is shown in several rows. Throws IoError, and what a span added by
/// add_later throws.
void write(const std::filesystem::path& file, int rank);

struct Interval {
  Clock::time_point begin, end;
};

/// A span; nothing where it begins before the recorder was started. Never throws: without memory it is only counted.
/// Name: "what which".
void add(Lane lane, const char* what, std::string_view which, Interval times) noexcept;
/// One whose times write() asks for, on the thread that calls it: of a device, which is behind the host.
void add_later(Lane lane, const char* what, std::string_view which, std::function<Interval()> times) noexcept;

/// A point in time, if the recorder is on: the begin of a span that ends somewhere else.
class Mark {
 public:
  Mark() = default;  // none
  static Mark now() noexcept { return on() ? Mark(Clock::now()) : Mark(); }
  /// The span from here to now, if this is a point.
  void end(Lane lane, const char* what, std::string_view which = {}) const noexcept {
    if (at_ != Clock::time_point()) add(lane, what, which, {at_, Clock::now()});
  }

 private:
  explicit Mark(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

/// The time from its construction to its end.
class Span {
 public:
  /// what, which: outlive the span.
  explicit Span(Lane lane, const char* what, std::string_view which = {}) noexcept
      : lane_(lane), what_(what), which_(which), begin_(Mark::now()) {}
  ~Span() { begin_.end(lane_, what_, which_); }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Lane lane_;
  const char* what_;
  std::string_view which_;
  Mark begin_;
};

}  // namespace ballast::trace
