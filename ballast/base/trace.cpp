#include "ballast/base/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <mutex>
#include <utility>
#include <vector>

#include "ballast/base/error.h"

namespace ballast::trace {
namespace {

struct Event {
  const char* lane;
  std::string name;
  Clock::time_point begin, end;
};

std::mutex mutex;  // guards both; spans are coarse (a unit, a chunk), so that nobody waits for it long
std::vector<Event> events;
Clock::time_point started;

double micros(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }

}  // namespace

void start() {
  const std::lock_guard lock(mutex);
  events.clear();
  started = Clock::now();
  detail::on.store(true, std::memory_order_relaxed);
}

void add(const char* lane, std::string name, Clock::time_point begin, Clock::time_point end) {
  const std::lock_guard lock(mutex);
  events.push_back({lane, std::move(name), begin, end});
}

void write(const std::filesystem::path& file, int rank) {
  detail::on.store(false, std::memory_order_relaxed);
  const std::lock_guard lock(mutex);
  std::vector<std::string> lanes;
  std::ofstream out(file);
  out << std::fixed;
  out.precision(3);
  out << "{\"traceEvents\":[\n";
  for (const Event& event : events) {
    auto lane = std::find(lanes.begin(), lanes.end(), event.lane);
    if (lane == lanes.end()) {
      lane = lanes.insert(lanes.end(), event.lane);
      out << R"({"ph":"M","name":"thread_name","pid":)" << rank << ",\"tid\":" << lanes.size() - 1
          << R"(,"args":{"name":")" << event.lane << "\"}},\n";
    }
    out << R"({"ph":"X","pid":)" << rank << ",\"tid\":" << lane - lanes.begin()
        << ",\"ts\":" << micros(event.begin - started) << ",\"dur\":" << micros(event.end - event.begin)
        << ",\"name\":\"" << event.name << "\"},\n";
  }
  out << R"({"ph":"M","name":"process_name","pid":)" << rank << R"(,"args":{"name":"rank )" << rank << "\"}}\n]}\n";
  events.clear();
  if (!out.flush())
    throw IoError("trace.write", "can't write the trace (", file.string(), ": ", std::strerror(errno),
                  "; give --trace a path in a writable folder with space)");
}

}  // namespace ballast::trace
