#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "ballast/comm/collective_log.h"
#include "ballast/comm/transport.h"

namespace ballast {

/// Follows collectives that the host has queued but doesn't wait for (NCCL). The host may hang in any CUDA call behind
/// one that never ends; this thread tells which one it is, before the backend's own watchdog ends the process.
class CollectiveWatch {
 public:
  /// report: called once, by the watching thread, for the first collective that failed or hasn't ended in time.
  using Report = std::function<void(std::uint64_t sequence, const std::string& cause)>;
  CollectiveWatch(CollectiveLog& log, std::chrono::milliseconds timeout, Report report);
  ~CollectiveWatch();  // stops following; what is still under way is the backend's business

  void follow(std::uint64_t sequence, std::unique_ptr<Flight> flight);

 private:
  struct Entry {
    std::uint64_t sequence;
    std::unique_ptr<Flight> flight;
    std::chrono::steady_clock::time_point deadline;
  };
  void run();
  /// Takes off what has ended. False after a report. held: mutex_.
  bool check(std::unique_lock<std::mutex>& held);

  CollectiveLog& log_;
  const std::chrono::milliseconds timeout_;
  const Report report_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;  // in launch order, which is the order in which they end
  bool stop_ = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace ballast
