#include "ballast/tiers/host_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include "ballast/base/trace.h"

namespace ballast::tiers {

HostLane::HostLane(c10::Device device, int threads) : threads_(threads), stream_(device), thread_([this] { work(); }) {}

HostLane::~HostLane() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  came_.notify_one();
  thread_.join();
}

HostLane::Ticket HostLane::submit(std::function<void()> job, const char* what) {
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    queue_.push_back({std::move(job), what});
    ticket = ++submitted_;
  }
  came_.notify_one();
  return ticket;
}

void HostLane::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  if (done_ >= ticket && !failure_) return;
  const trace::Span span("caller", "waits for the host lane");
  went_.wait(lock, [&] { return done_ >= ticket || failure_; });
  if (failure_) std::rethrow_exception(failure_);
}

void HostLane::drain() {
  std::unique_lock lock(mutex_);
  went_.wait(lock, [&] { return done_ >= submitted_ || failure_; });
  if (failure_) std::rethrow_exception(failure_);
}

void HostLane::rethrow_failure() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void HostLane::work() {
  // Neither guard is inherited from the thread that made this one. Operators here work on storages that the computation
  // must not see yet: the observer of parameter faults would wait for this very thread. LibTorch's thread count is left
  // alone: at::set_num_threads sets MKL's for the whole process, and passes here take theirs as an argument.
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unobserved;
  const DeviceStream::Scope on(stream_);

  std::unique_lock lock(mutex_);
  while (true) {
    came_.wait(lock, [&] { return !queue_.empty() || ending_; });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      if (before_job_) before_job_(job.what);
      job.run();
    } catch (...) {
      error = std::current_exception();
    }
    job.run = nullptr;  // what it holds goes before anybody hears that it has run
    lock.lock();
    ++done_;
    if (error) {
      failure_ = error;
      queue_.clear();
    }
    went_.notify_all();
  }
}

}  // namespace ballast::tiers
