#include "ballast/base/trace.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <mutex>
#include <utility>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/trace_json.h"

namespace ballast::trace {
namespace {

constexpr std::array kLaneNames{"steps",  "caller",   "caller waits", "compute",    "gather", "reduce",
                                "copies", "host add", "host update",  "host waits", "disk"};
static_assert(kLaneNames.size() == static_cast<std::size_t>(Lane::kDisk) + 1);

struct Event {
  Lane lane;
  std::string name;
  Interval times;
  std::function<Interval()> later;  // where the times aren't known yet
};

struct Recording {
  Clock::time_point started;
  std::size_t most = 0;
  std::vector<Event> events;
  std::uint64_t dropped = 0;
};

std::mutex mutex;  // guards what follows; spans are coarse (a unit, a chunk), so that nobody waits for it long
// Never destroyed: what add_later() was given may belong to a device that is gone by then.
Recording& recording = *new Recording;

// begin: of the span, or now where it is the device's to say.
void record(Lane lane, const char* what, std::string_view which, Clock::time_point begin, Interval times,
            std::function<Interval()> later) noexcept {
  const std::lock_guard lock(mutex);
  if (begin < recording.started) return;
  if (recording.events.size() >= recording.most) {
    ++recording.dropped;
    return;
  }
  try {
    std::string name = what;
    if (!which.empty()) name.append(" ").append(which);
    recording.events.push_back({lane, std::move(name), times, std::move(later)});
  } catch (...) {  // no memory: the run matters more than its picture
    ++recording.dropped;
  }
}

// Exact: the clock's nanoseconds are three digits behind a microsecond's point.
std::string micros(Clock::duration time) {
  const auto nanos = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%lld.%03lld", static_cast<long long>(nanos / 1000),
                static_cast<long long>(nanos % 1000));
  return text.data();
}

// Rows of a lane, in each of which a span either holds the next or ends before it begins, as viewers want it.
std::vector<std::vector<const Event*>> rows_of(std::vector<const Event*> events) {
  std::stable_sort(events.begin(), events.end(), [](const Event* a, const Event* b) {
    return a->times.begin != b->times.begin ? a->times.begin < b->times.begin : a->times.end > b->times.end;
  });
  std::vector<std::vector<const Event*>> rows;
  std::vector<std::vector<Clock::time_point>> open;  // by row: ends of the spans that hold each other now
  for (const Event* event : events) {
    std::size_t row = 0;
    for (; row < rows.size(); ++row) {
      auto& ends = open[row];
      while (!ends.empty() && ends.back() <= event->times.begin) ends.pop_back();
      if (ends.empty() || event->times.end <= ends.back()) break;
    }
    if (row == rows.size()) rows.emplace_back(), open.emplace_back();
    rows[row].push_back(event);
    open[row].push_back(event->times.end);
  }
  return rows;
}

}  // namespace

void start(std::size_t most) {
  const std::lock_guard lock(mutex);
  recording = {.started = Clock::now(), .most = most, .events = {}, .dropped = 0};
  detail::on.store(true, std::memory_order_relaxed);
}

void stop() noexcept { detail::on.store(false, std::memory_order_relaxed); }

Clock::time_point started() noexcept {
  const std::lock_guard lock(mutex);
  return recording.started;
}

void add(Lane lane, const char* what, std::string_view which, Interval times) noexcept {
  record(lane, what, which, times.begin, times, {});
}

void add_later(Lane lane, const char* what, std::string_view which, std::function<Interval()> times) noexcept {
  record(lane, what, which, Clock::now(), {}, std::move(times));
}

void write(const std::filesystem::path& file, int rank) {
  stop();
  Recording taken;
  {
    const std::lock_guard lock(mutex);  // not held below: a device may take its time to say when
    taken =
        std::exchange(recording, {.started = recording.started, .most = recording.most, .events = {}, .dropped = 0});
  }
  std::array<std::vector<const Event*>, kLaneNames.size()> lanes;
  std::size_t spans = 0;
  for (Event& event : taken.events) {
    if (event.later) event.times = event.later();
    if (event.times.begin < taken.started) continue;
    ++spans;
    lanes[static_cast<std::size_t>(event.lane)].push_back(&event);
  }

  std::ofstream out(file, std::ios::binary);
  const std::string pid = R"("pid":)" + std::to_string(rank);
  out << R"({"displayTimeUnit":"ms","otherData":{"spans":)" << spans << R"(,"spans_left_out":)" << taken.dropped
      << "},\"traceEvents\":[\n"
      << R"({"ph":"M","name":"process_name",)" << pid << R"(,"args":{"name":"rank )" << rank << "\"}}";
  int tid = 0;
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    const auto rows = rows_of(std::move(lanes[lane]));
    for (std::size_t row = 0; row < rows.size(); ++row, ++tid) {
      const std::string where = pid + R"(,"tid":)" + std::to_string(tid);
      const std::string name = kLaneNames[lane] + (row > 0 ? " " + std::to_string(row + 1) : "");
      out << ",\n{\"ph\":\"M\",\"name\":\"thread_name\"," << where << R"(,"args":{"name":)" << json_string(name)
          << "}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\"," << where << R"(,"args":{"sort_index":)" << tid
          << "}}";
      for (const Event* event : rows[row])
        out << ",\n{\"ph\":\"X\"," << where << ",\"ts\":" << micros(event->times.begin - taken.started)
            << ",\"dur\":" << micros(event->times.end - event->times.begin) << ",\"name\":" << json_string(event->name)
            << "}";
    }
  }
  out << "\n]}\n";
  if (!out.flush())
    throw IoError("trace.write", "can't write the trace (", file.string(), ": ", std::strerror(errno),
                  "; give a path in a writable folder with space)");
  if (taken.dropped > 0)
    log_warning("the trace is not whole: ", taken.dropped, " spans came after the ", taken.most, " that it may hold (",
                file.string(), "; record fewer steps)");
}

}  // namespace ballast::trace
