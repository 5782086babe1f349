#include "tests/engine/support/lane_gate.h"

#include <chrono>
#include <stdexcept>
#include <utility>

namespace ballast::testing {

LaneGate::~LaneGate() {
  if (opener_.joinable()) opener_.join();
  open();
}

void LaneGate::pass(std::string_view what) {
  if (what != "update") return;
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [&] { return is_open_ || admitted_ > 0; });
  if (!is_open_) --admitted_;
  ++passed_;
  if (!failure_.empty()) throw std::runtime_error(std::exchange(failure_, {}));
}

void LaneGate::let(int updates) {
  if (opener_.joinable()) opener_.join();
  const std::lock_guard lock(mutex_);
  is_open_ = false;
  admitted_ = updates;
  opened_.notify_all();
}

void LaneGate::open() {
  const std::lock_guard lock(mutex_);
  is_open_ = true;
  opened_.notify_all();
}

void LaneGate::open_soon() {
  opener_ = std::thread([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    open();
  });
}

void LaneGate::fail_next(const std::string& text) {
  const std::lock_guard lock(mutex_);
  failure_ = text;
}

int LaneGate::passed() const {
  const std::lock_guard lock(mutex_);
  return passed_;
}

}  // namespace ballast::testing
