#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>

#include "ballast/tiers/device_stream.h"

namespace ballast::tiers {

/// Copies between a device and host memory that isn't page-locked, through two blocks that are: the driver's own way is
/// several times slower than the bus, and memory that is new for each copy takes longer to get than the copy. Of one
/// thread. What is on the CPU on both sides is copied directly, and takes no memory.
class BounceBuffer {
 public:
  /// pin: as HostArena's. Takes 32 MiB of host memory with the first copy that needs them.
  BounceBuffer(c10::Device device, bool pin) : device_(device), pin_(pin) {}
  ~BounceBuffer();  // waits for the copies
  BounceBuffer(const BounceBuffer&) = delete;
  BounceBuffer& operator=(const BounceBuffer&) = delete;

  /// The elements of `tensor` in their order, part by part: each [n], contiguous, on the CPU, there until `take`
  /// returns.
  void read(const at::Tensor& tensor, const std::function<void(const at::Tensor& part)>& take);
  /// Copies [n], contiguous, on the CPU, to [n] wherever that is, rounded to its dtype. Behind the call `from` is free;
  /// the device has the values for what is queued on the current stream from now on.
  void write(const at::Tensor& from, const at::Tensor& to);

 private:
  struct Block {
    at::Tensor memory;
    DeviceEvent sent;
  };
  Block& next_block();

  const c10::Device device_;
  const bool pin_;
  std::array<Block, 2> blocks_;
  std::size_t last_ = 0;
};

}  // namespace ballast::tiers
