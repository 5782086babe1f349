#include "ballast/tiers/device_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ballast::tiers {

DeviceEvent::DeviceEvent(c10::Stream recorded_on) {
  if (recorded_on.device().is_cpu()) return;
  event_ = std::make_shared<c10::Event>(recorded_on.device_type());
  event_->record(recorded_on);
}

void DeviceEvent::block(c10::Stream stream) const {
  if (event_) event_->block(stream);
}

void DeviceEvent::block_current_stream() const {
  if (event_) event_->block(c10::impl::VirtualGuardImpl(event_->device_type()).getStream(event_->device()));
}

void DeviceEvent::synchronize() const {
  if (event_) event_->synchronize();
}

DeviceStream::DeviceStream(c10::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
}

DeviceEvent DeviceStream::mark() const { return stream_ ? DeviceEvent(*stream_) : DeviceEvent(); }

void DeviceStream::wait_for(const DeviceEvent& event) const {
  if (stream_) event.block(*stream_);
}

DeviceEvent DeviceStream::mark_current(c10::Device device) {
  if (device.is_cpu()) return {};
  return DeviceEvent(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

DeviceStream::Scope::Scope(const DeviceStream& stream) {
  if (stream.stream_) guard_.emplace(*stream.stream_);
}

void keep_for_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu() || !tensor.has_storage()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

}  // namespace ballast::tiers
