#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>

#include "ballast/tiers/device_stream.h"
#include "ballast/tiers/lane_hook.h"

namespace ballast::tiers {

/// The thread on which everything happens that a rank does beside the computation: gradients added on the host,
/// updates, reads and writes of the swap file, copies of new parameters to the device. Jobs run one after the other in
/// the order in which they were queued, so that no two of them ever meet on the same bytes and the next window's
/// gradients can't reach a sum that an update still reads. Each job may use `threads()` OpenMP threads.
///
/// A job that throws ends the lane: later jobs don't run, and every later call but the destructor throws its error.
class HostLane {
 public:
  using Ticket = std::uint64_t;  // 0: no job
  /// Wall clock since the start.
  struct Times {
    std::map<std::string_view, std::chrono::duration<double>> busy;  // by kind of job
    std::chrono::duration<double> waited{};                          // others in wait() and drain()
  };

  /// device: whose stream the jobs' copies and collectives are queued on, beside the computation's.
  HostLane(c10::Device device, int threads);
  /// Runs what is queued, never throws. The calling thread's current stream goes on behind what that has queued on the
  /// device: what the lane's copies still write may be read, or let go, from then on.
  ~HostLane();
  HostLane(const HostLane&) = delete;
  HostLane& operator=(const HostLane&) = delete;

  /// what: kind of the job, a literal.
  Ticket submit(std::function<void()> job, const char* what = "states");
  /// Until this job and all before it have run. what, which: what for, in the trace.
  void wait(Ticket ticket, const char* what = "host", std::string_view which = {});
  void drain();
  /// The job and all before it have run. Never waits for them.
  bool has_run(Ticket ticket);
  /// submit() and wait().
  void run(std::function<void()> job) { wait(submit(std::move(job))); }
  void rethrow_failure();

  Times times();
  int threads() const { return threads_; }
  /// The current stream of every job.
  const DeviceStream& stream() const { return stream_; }

 private:
  struct Job {
    std::function<void()> run;
    const char* what;
  };
  void work();
  void wait(std::unique_lock<std::mutex>& held, Ticket ticket, const char* what, std::string_view which);

  const testing::LaneHook::Body before_job_ = testing::LaneHook::current();
  const int threads_;
  const DeviceStream stream_;
  std::mutex mutex_;                     // guards all below; never held while a job runs
  std::condition_variable came_, went_;  // a job was queued (or the end); a job has run
  std::deque<Job> queue_;
  Ticket submitted_ = 0, done_ = 0;
  Times times_;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // last: it uses the others from its first moment
};

}  // namespace ballast::tiers
