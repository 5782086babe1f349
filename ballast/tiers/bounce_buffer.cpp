#include "ballast/tiers/bounce_buffer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/tiers/host_arena.h"

namespace ballast::tiers {
namespace {

constexpr std::int64_t kBlockBytes = std::int64_t{16} << 20;

}  // namespace

BounceBuffer::~BounceBuffer() {
  for (const Block& block : blocks_) block.sent.synchronize();
}

BounceBuffer::Block& BounceBuffer::next_block() {
  if (!blocks_[0].memory.defined()) {
    HostArena arena(static_cast<std::int64_t>(blocks_.size()) * kBlockBytes, pin_, device_);
    for (Block& block : blocks_) block.memory = arena.allocate(kBlockBytes, at::kByte);
  }
  last_ = (last_ + 1) % blocks_.size();
  blocks_[last_].sent.synchronize();
  return blocks_[last_];
}

void BounceBuffer::read(const at::Tensor& tensor, const std::function<void(const at::Tensor& part)>& take) {
  const at::Tensor flat = tensor.contiguous().view(-1);
  if (flat.is_cpu()) return take(flat);
  const std::int64_t longest = kBlockBytes / static_cast<std::int64_t>(flat.element_size());
  for (std::int64_t begin = 0; begin < flat.numel(); begin += longest) {
    const std::int64_t n = std::min(longest, flat.numel() - begin);
    take(next_block().memory.view(flat.scalar_type()).narrow(0, 0, n).copy_(flat.narrow(0, begin, n)));
  }
}

void BounceBuffer::write(const at::Tensor& from, const at::Tensor& to) {
  if (to.is_cpu()) {
    to.copy_(from);
    return;
  }
  const std::int64_t longest = kBlockBytes / static_cast<std::int64_t>(to.element_size());
  for (std::int64_t begin = 0; begin < to.numel(); begin += longest) {
    const std::int64_t n = std::min(longest, to.numel() - begin);
    Block& block = next_block();
    // Here on the host's threads, rounded where it must be: what crosses the bus is in its dtype.
    const at::Tensor staged = block.memory.view(to.scalar_type()).narrow(0, 0, n).copy_(from.narrow(0, begin, n));
    to.narrow(0, begin, n).copy_(staged, /*non_blocking=*/true);
    block.sent = DeviceStream::mark_current(to.device());
  }
}

}  // namespace ballast::tiers
