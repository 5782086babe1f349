#include "ballast/tiers/device_span.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <map>
#include <mutex>

namespace ballast::tiers {
namespace {

using trace::Clock;

c10::Event record(c10::Stream stream) {
  c10::Event event(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT);  // the one kind that is timed
  event.record(stream);
  return event;
}

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

/// One moment on both clocks. Taken on a stream of its own, so that it waits for nothing that is queued.
struct Anchor {
  explicit Anchor(c10::Device device)
      : event(record(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false))) {
    event.synchronize();
    at = Clock::now();
  }
  Clock::time_point of(const c10::Event& moment) const {
    moment.synchronize();
    const std::chrono::duration<double, std::milli> since(event.elapsedTime(moment));
    return at + std::chrono::duration_cast<Clock::duration>(since);
  }
  c10::Event event;
  Clock::time_point at;
};

// One a device and recording: two that differ by a microsecond would tear spans apart that follow each other.
std::shared_ptr<const Anchor> anchor_of(c10::Device device) {
  static std::mutex mutex;  // guards what follows
  // Never destroyed: its events need the device, which may be gone by then.
  static auto& anchors = *new std::map<c10::DeviceIndex, std::shared_ptr<const Anchor>>;
  static Clock::time_point recording;
  const std::lock_guard lock(mutex);
  if (recording != trace::started()) {
    recording = trace::started();
    anchors.clear();
  }
  auto& anchor = anchors[device.index()];
  if (!anchor) anchor = std::make_shared<const Anchor>(device);
  return anchor;
}

}  // namespace

struct DeviceMark::Point {
  std::shared_ptr<const Anchor> anchor;
  c10::Device device;
  c10::Event event;
};

DeviceMark::DeviceMark(c10::Device device) noexcept {
  if (device.is_cpu()) {
    host_ = trace::Mark::now();
    return;
  }
  try {
    const c10::Stream stream = current_stream(device);
    device_ = std::make_shared<const Point>(Point{anchor_of(stream.device()), stream.device(), record(stream)});
  } catch (...) {  // the device's error comes again with the next operator, where it can be thrown
  }
}

void DeviceMark::end(trace::Lane lane, const char* what, std::string_view which) const noexcept {
  host_.end(lane, what, which);
  if (!device_) return;
  try {
    auto last = std::make_shared<const c10::Event>(record(current_stream(device_->device)));
    trace::add_later(lane, what, which, [first = device_, last = std::move(last)]() -> trace::Interval {
      return {first->anchor->of(first->event), first->anchor->of(*last)};
    });
  } catch (...) {  // as above
  }
}

}  // namespace ballast::tiers
