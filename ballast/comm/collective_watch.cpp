#include "ballast/comm/collective_watch.h"

#include <algorithm>
#include <utility>

#include "ballast/comm/communicator_shared.h"

namespace ballast {

using Clock = std::chrono::steady_clock;

CollectiveWatch::CollectiveWatch(CollectiveLog& log, std::chrono::milliseconds timeout, Report report)
    : log_(log), timeout_(timeout), report_(std::move(report)), thread_([this] { run(); }) {}

CollectiveWatch::~CollectiveWatch() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void CollectiveWatch::follow(std::uint64_t sequence, std::unique_ptr<Flight> flight) {
  {
    std::lock_guard lock(mutex_);
    entries_.push_back({sequence, std::move(flight), Clock::now() + timeout_});
  }
  changed_.notify_one();
}

void CollectiveWatch::run() {
  const auto pause = std::clamp(timeout_ / 10, std::chrono::milliseconds(1), std::chrono::milliseconds(100));
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || !entries_.empty(); });
    if (stop_ || !check(lock)) return;
    if (changed_.wait_for(lock, pause, [this] { return stop_; })) return;
  }
}

bool CollectiveWatch::check(std::unique_lock<std::mutex>& held) {
  while (!entries_.empty()) {
    const std::uint64_t sequence = entries_.front().sequence;
    std::string cause;
    try {
      if (entries_.front().flight->finished()) {
        log_.ended(sequence, CollectiveLog::State::kDone);
        entries_.pop_front();
        continue;
      }
      if (Clock::now() < entries_.front().deadline) return true;
      cause = "not ended after " + std::to_string(timeout_.count()) + " ms";
    } catch (const std::exception& error) {
      cause = cause_of(error);
    }
    log_.ended(sequence, CollectiveLog::State::kFailed);
    held.unlock();  // the report takes other locks
    report_(sequence, cause);
    held.lock();
    return false;
  }
  return true;
}

}  // namespace ballast
