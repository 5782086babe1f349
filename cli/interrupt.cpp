#include "cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>

namespace ballast::cli {
namespace {

std::atomic<std::time_t> asked_at{0};  // seconds on the monotonic clock; 0: not yet
static_assert(std::atomic<std::time_t>::is_always_lock_free, "a signal handler writes it");

std::time_t now() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1;  // never 0
}

void on_signal(int) {
  const std::time_t first = asked_at.load(std::memory_order_relaxed);
  if (first == 0) {
    asked_at.store(now(), std::memory_order_relaxed);
  } else if (now() - first >= 2) {
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

void ask_for_an_end() noexcept {
  std::time_t none = 0;
  asked_at.compare_exchange_strong(none, now(), std::memory_order_relaxed);
}

}  // namespace ballast::cli
