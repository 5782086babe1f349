#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace ballast {

/// Tells ThreadSanitizer of an order that comes about in code it can't see, of a library or the kernel: all before
/// publish() happens before all after observe() of the same point. It makes no order itself, and in other builds it is
/// nothing.
class SyncPoint {
 public:
  void publish() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(this);
#endif
  }
  void observe() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(this);
#endif
  }
};

}  // namespace ballast
