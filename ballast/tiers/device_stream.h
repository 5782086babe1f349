#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace c10 {
struct Event;
}

namespace ballast::tiers {

/// A point in a device stream's work; copies are the same point. On the CPU, which does its work at once, always
/// reached.
class DeviceEvent {
 public:
  DeviceEvent() = default;  // reached
  explicit DeviceEvent(c10::Stream recorded_on);

  /// What is queued on the calling thread's current stream from now on comes after this point; the host goes on.
  void block_current_stream() const;
  void block(c10::Stream stream) const;
  /// The host waits.
  void synchronize() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

/// A stream of its own on `device`, so that copies run beside the computation. On the CPU there is none: what is queued
/// "on it" has run when the call returns.
class DeviceStream {
 public:
  explicit DeviceStream(c10::Device device);

  c10::Device device() const { return device_; }
  /// A point after all that is queued here so far.
  DeviceEvent mark() const;
  /// What is queued here from now on comes after that point.
  void wait_for(const DeviceEvent& event) const;
  /// A point in the calling thread's current stream.
  static DeviceEvent mark_current(c10::Device device);

  /// While it lives, this stream is the calling thread's current one.
  class Scope {
   public:
    explicit Scope(const DeviceStream& stream);

   private:
    std::optional<c10::StreamGuard> guard_;
  };

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

/// The memory behind `tensor` is not used for anything else before what is queued on the calling thread's current
/// stream so far has run: what was allocated on another one's behalf may be let go behind this.
void keep_for_current_stream(const at::Tensor& tensor);

}  // namespace ballast::tiers
