#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

namespace ballast {

/// The last collectives of one communicator, for the text of an error: what this rank was doing when a peer failed.
/// Thread-safe: a collective may be launched by one thread and waited for by another.
class CollectiveLog {
 public:
  static constexpr std::size_t kLength = 16;
  enum class State : std::uint8_t { kInFlight, kDone, kFailed };

  /// Notes a launch and returns its sequence number: 1, 2, ... on every rank alike.
  std::uint64_t launched(const char* operation, const std::string& what, std::int64_t bytes);
  void ended(std::uint64_t sequence, State state) noexcept;
  /// "#7 all_gather unit blocks.3 1.50 MiB done, #8 all_to_all unit blocks.2 1.50 MiB in flight"; oldest first.
  std::string text() const;

 private:
  struct Entry {
    std::uint64_t sequence = 0;
    const char* operation = "";
    std::string what;
    std::int64_t bytes = 0;
    State state = State::kInFlight;
  };

  mutable std::mutex mutex_;
  std::array<Entry, kLength> ring_;
  std::uint64_t last_ = 0;
};

}  // namespace ballast
