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
  try {
    stream_.mark().block_current_stream();
  } catch (const std::exception&) {  // of a device that is broken, which every later use of it says
  }
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

void HostLane::wait(Ticket ticket, const char* what, std::string_view which) {
  std::unique_lock lock(mutex_);
  wait(lock, ticket, what, which);
}

bool HostLane::has_run(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  return done_ >= ticket;
}

void HostLane::drain() {
  std::unique_lock lock(mutex_);
  wait(lock, submitted_, "all on the host", {});
}

void HostLane::wait(std::unique_lock<std::mutex>& held, Ticket ticket, const char* what, std::string_view which) {
  if (done_ < ticket && !failure_) {
    const trace::Span span(trace::Lane::kCallerWaits, what, which);
    const auto since = std::chrono::steady_clock::now();
    went_.wait(held, [&] { return done_ >= ticket || failure_; });
    times_.waited += std::chrono::steady_clock::now() - since;
  }
  if (failure_) std::rethrow_exception(failure_);
}

HostLane::Times HostLane::times() {
  const std::lock_guard lock(mutex_);
  return times_;
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
    const auto since = std::chrono::steady_clock::now();
    std::exception_ptr error;
    try {
      if (before_job_) before_job_(job.what);
      job.run();
    } catch (...) {
      error = std::current_exception();
    }
    job.run = nullptr;  // what it holds goes before anybody hears that it has run
    lock.lock();
    times_.busy[job.what] += std::chrono::steady_clock::now() - since;
    ++done_;
    if (error) {
      failure_ = error;
      queue_.clear();
    }
    went_.notify_all();
  }
}

}  // namespace ballast::tiers
