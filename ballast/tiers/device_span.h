#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string_view>

#include "ballast/base/trace.h"

namespace ballast::tiers {

/// For the trace, in the device's time: the moment at which the calling thread's current stream gets to where it is
/// now. On the CPU that is now. With the recorder off it is no moment.
class DeviceMark {
 public:
  DeviceMark() = default;  // none
  static DeviceMark now(c10::Device device) noexcept { return trace::on() ? DeviceMark(device) : DeviceMark(); }
  /// The span from here to now, of the current stream of this thread, if this is a moment.
  void end(trace::Lane lane, const char* what, std::string_view which = {}) const noexcept;

 private:
  struct Point;
  explicit DeviceMark(c10::Device device) noexcept;
  trace::Mark host_;                     // on the CPU
  std::shared_ptr<const Point> device_;  // else
};

/// From its construction to its end, in the device's time.
class DeviceSpan {
 public:
  /// what, which: outlive the span.
  DeviceSpan(trace::Lane lane, const char* what, std::string_view which, c10::Device device) noexcept
      : lane_(lane), what_(what), which_(which), begin_(DeviceMark::now(device)) {}
  ~DeviceSpan() { begin_.end(lane_, what_, which_); }
  DeviceSpan(const DeviceSpan&) = delete;
  DeviceSpan& operator=(const DeviceSpan&) = delete;

 private:
  trace::Lane lane_;
  const char* what_;
  std::string_view which_;
  DeviceMark begin_;
};

}  // namespace ballast::tiers
