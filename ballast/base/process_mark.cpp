#include "ballast/base/process_mark.h"

#include <pthread.h>

#include <atomic>

namespace ballast {
namespace {

std::atomic<std::uint64_t> forks = 0;  // that lie between this process and the one that loaded the library

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });

}  // namespace

std::uint64_t ProcessMark::current() noexcept { return forks.load(std::memory_order_relaxed); }

}  // namespace ballast
