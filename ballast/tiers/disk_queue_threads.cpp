#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {
namespace {

/// A program's signals are its own threads' business: a thread made while this lives gets none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

class ThreadQueue final : public DiskQueue {
 public:
  ThreadQueue(const DiskFile& file, int depth, int threads) : file_(file), depth_(depth) {
    const SignalsBlocked blocked;
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this](const std::stop_token& stop) { work(stop); });
  }
  // The threads end before the rest: each finishes the request that it has begun, the others are dropped.

  const char* name() const noexcept override { return "threads"; }
  int depth() const noexcept override { return depth_; }
  int in_flight() const noexcept override { return in_flight_; }

  void submit(std::span<const DiskRequest> requests) override {
    {
      const std::lock_guard lock(mutex_);
      to_do_.insert(to_do_.end(), requests.begin(), requests.end());
    }
    in_flight_ += static_cast<int>(requests.size());
    work_came_.notify_all();
  }

  std::optional<DiskCompletion> reap(bool wait) override {
    if (in_flight_ == 0) return std::nullopt;
    std::unique_lock lock(mutex_);
    if (wait) work_done_.wait(lock, [this] { return !done_.empty(); });
    if (done_.empty()) return std::nullopt;
    const DiskCompletion completion = done_.front();
    done_.pop_front();
    --in_flight_;
    return completion;
  }

 private:
  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (work_came_.wait(lock, stop, [this] { return !to_do_.empty(); })) {
      if (stop.stop_requested()) return;
      const DiskRequest request = to_do_.front();
      to_do_.pop_front();
      lock.unlock();  // never held across I/O
      const DiskCompletion completion{.tag = request.tag, .result = transfer(request)};
      lock.lock();
      done_.push_back(completion);
      work_done_.notify_one();
    }
  }

  std::int64_t transfer(const DiskRequest& request) const noexcept {
    const auto bytes = static_cast<std::size_t>(request.bytes);
    const ssize_t moved = request.op == DiskOp::kRead ? ::pread(file_.fd(), request.data, bytes, request.offset)
                                                      : ::pwrite(file_.fd(), request.data, bytes, request.offset);
    return moved < 0 ? -static_cast<std::int64_t>(errno) : moved;
  }

  const DiskFile& file_;
  const int depth_;
  int in_flight_ = 0;  // the driving thread's alone
  std::mutex mutex_;   // guards to_do_ and done_
  std::condition_variable_any work_came_, work_done_;
  std::deque<DiskRequest> to_do_;
  std::deque<DiskCompletion> done_;
  std::vector<std::jthread> threads_;  // last: they use all of the above
};

}  // namespace

std::unique_ptr<DiskQueue> make_thread_queue(const DiskFile& file, int depth, int threads) {
  return std::make_unique<ThreadQueue>(file, depth, threads);
}

}  // namespace ballast::tiers
