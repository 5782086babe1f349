#pragma once

#include <functional>
#include <string_view>

namespace ballast::testing {

/// A seam for tests that delay or fail what a rank does beside the computation. While it lives, lanes that the same
/// thread makes (those of its engines) call `body` before each of their jobs, for as long as they live, with the kind
/// of the job: "update", "gradients", "states", or "parameters" on the lane of their disk. What it throws is the job's
/// error.
class LaneHook {
 public:
  using Body = std::function<void(std::string_view what)>;
  explicit LaneHook(Body body);
  ~LaneHook();
  LaneHook(const LaneHook&) = delete;
  LaneHook& operator=(const LaneHook&) = delete;

  /// Of the calling thread; empty without one.
  static const Body& current();

 private:
  Body outer_;
};

}  // namespace ballast::testing
