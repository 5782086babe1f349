#pragma once

#include <mutex>
#include <string>

#include "ballast/base/log.h"

namespace ballast::testing {

/// Lines that this process logs while it lives, from whichever rank.
class LogLines {
 public:
  LogLines() {
    set_log_sink([this](LogLevel, const std::string& line) {
      const std::lock_guard lock(mutex_);
      text_ += line + "\n";
    });
  }
  ~LogLines() { set_log_sink({}); }
  std::string text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
};

}  // namespace ballast::testing
