#include "cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>

namespace ballast::cli {
namespace {

std::atomic<std::time_t> asked_at{0};  // seconds on the monotonic clock; 0: not yet
static_assert(std::atomic<std::time_t>::is_always_lock_free, "a signal handler writes it");

void on_signal(int) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::time_t first = asked_at.load(std::memory_order_relaxed);
  if (first == 0) {
    asked_at.store(now.tv_sec + 1, std::memory_order_relaxed);  // + 1: never 0
  } else if (now.tv_sec + 1 - first >= 2) {
    ::_exit(130);
  }
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a peer's socket must not fail with EINTR
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() noexcept { return asked_at.load(std::memory_order_relaxed) != 0; }

}  // namespace ballast::cli
