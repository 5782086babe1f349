#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace ballast::ckpt {

/// A few threads that move blocks, so that a disk has the next one while the last is still under way. Started with the
/// first job.
class Workers {
 public:
  explicit Workers(int threads) : wanted_(threads) {}
  ~Workers() {  // runs what is queued first: the jobs' memory outlives them
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// The future holds what the job throws.
  std::future<void> submit(std::function<void()> job) {
    std::packaged_task<void()> task(std::move(job));
    std::future<void> done = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(task));
    }
    wake_.notify_one();
    if (static_cast<int>(threads_.size()) < wanted_) threads_.emplace_back([this] { run(); });
    return done;
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      std::packaged_task<void()> task = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  const int wanted_;
  std::mutex mutex_;  // guards jobs_ and ending_, never held across a job
  std::condition_variable wake_;
  std::deque<std::packaged_task<void()>> jobs_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ballast::ckpt
