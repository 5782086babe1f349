#pragma once

#include <functional>
#include <utility>

namespace ballast {

/// Ends something of the engine exactly once: when end() is called, or when the guard dies. Move-only. A guard that
/// outlives its engine (shutdown() came first) ends nothing: a writer's values don't reach the other ranks then. end()
/// throws what ending throws; a destructor can't, so there the error waits for the engine's next call.
class ScopeGuard {
 public:
  ScopeGuard(std::function<void()> end, std::function<void()> end_quietly)
      : end_(std::move(end)), end_quietly_(std::move(end_quietly)) {}
  ScopeGuard(ScopeGuard&& from) noexcept
      : end_(std::exchange(from.end_, nullptr)), end_quietly_(std::exchange(from.end_quietly_, nullptr)) {}
  ScopeGuard& operator=(ScopeGuard from) noexcept {
    std::swap(end_, from.end_);
    std::swap(end_quietly_, from.end_quietly_);
    return *this;
  }
  ~ScopeGuard() {
    if (end_quietly_) end_quietly_();
  }

  void end() {
    end_quietly_ = nullptr;
    if (auto now = std::exchange(end_, nullptr)) now();
  }

 private:
  std::function<void()> end_, end_quietly_;
};

}  // namespace ballast
