#include "ballast/optim/upload_ring.h"

#include <ATen/ATen.h>

#include "ballast/base/trace.h"
#include "ballast/tiers/device_span.h"
#include "ballast/tiers/host_arena.h"

namespace ballast {

UploadRing::UploadRing(std::int64_t slot_bytes, bool pin_memory, c10::Device device,
                       const std::shared_ptr<Ledger>& ledger)
    : device_(device) {
  if (device.is_cpu()) return;
  tiers::HostArena arena(kSlots * tiers::HostArena::bytes_of(slot_bytes, at::kByte), pin_memory, device);
  for (Slot& slot : slots_) slot.memory = arena.allocate(slot_bytes, at::kByte);
  bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, bytes(slot_bytes, device.type()));
}

at::Tensor UploadRing::stage(const at::Tensor& to, std::string_view unit) {
  if (to.is_cpu()) return to;
  last_ = (last_ + 1) % slots_.size();
  const trace::Span wait(trace::Lane::kHostWaits, "room to send", unit);
  slots_[last_].copied.synchronize();
  return slots_[last_].memory.narrow(0, 0, static_cast<std::int64_t>(to.nbytes())).view(to.scalar_type());
}

void UploadRing::send(const at::Tensor& staged, const at::Tensor& to, std::string_view unit) {
  if (to.is_cpu()) return;
  const tiers::DeviceSpan copy(trace::Lane::kCopies, "to the device: parameters of", unit, device_);
  to.copy_(staged, /*non_blocking=*/true);
  slots_[last_].copied = tiers::DeviceStream::mark_current(device_);
}

}  // namespace ballast
