#include "ballast/comm/collective_log.h"

#include <algorithm>
#include <sstream>

#include "ballast/base/bytes.h"

namespace ballast {

std::uint64_t CollectiveLog::launched(const char* operation, const std::string& what, std::int64_t bytes) {
  std::lock_guard lock(mutex_);
  Entry& entry = ring_[++last_ % kLength];
  entry.sequence = last_;
  entry.operation = operation;
  entry.what.assign(what);  // keeps the slot's capacity: no allocation once the ring is warm
  entry.bytes = bytes;
  entry.state = State::kInFlight;
  return last_;
}

void CollectiveLog::ended(std::uint64_t sequence, State state) noexcept {
  std::lock_guard lock(mutex_);
  Entry& entry = ring_[sequence % kLength];
  if (entry.sequence == sequence) entry.state = state;  // otherwise 16 younger ones have been launched since
}

std::string CollectiveLog::text() const {
  static constexpr const char* kStates[] = {"in flight", "done", "failed"};
  std::lock_guard lock(mutex_);
  std::ostringstream out;
  const std::uint64_t first = last_ > kLength ? last_ - kLength + 1 : 1;
  for (std::uint64_t sequence = first; sequence <= last_; ++sequence) {
    const Entry& entry = ring_[sequence % kLength];
    out << (sequence == first ? "" : ", ") << '#' << sequence << ' ' << entry.operation << ' ' << entry.what << ' '
        << format_bytes(entry.bytes) << ' ' << kStates[static_cast<int>(entry.state)];
  }
  return out.str();
}

}  // namespace ballast
