#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace ballast::tiers {

/// One slab of host memory for the long-lived states of a plan that is exact, handed out from its start to its end and
/// given back when the last tensor in it dies. In huge pages where the system has them.
class HostArena {
 public:
  /// bytes: the sum of bytes_of() over all allocations to come. pin: page-locks the slab for copies from and to
  /// `device`; without effect for the CPU. Throws MemoryError where the system or the driver refuses.
  HostArena(std::int64_t bytes, bool pin, c10::Device device);

  /// [numel], contiguous, on the CPU, at a multiple of 4096, zeros. It shares the slab and may outlive the arena.
  /// Throws MemoryError where the plan has no room left for it.
  at::Tensor allocate(std::int64_t numel, c10::ScalarType type);

  /// What allocate() takes of the plan: whole multiples of 4096 bytes.
  static std::int64_t bytes_of(std::int64_t numel, c10::ScalarType type);

  std::int64_t bytes() const noexcept { return bytes_; }
  std::int64_t left() const noexcept { return bytes_ - used_; }
  bool pinned() const noexcept;

 private:
  class Slab;
  std::shared_ptr<Slab> slab_;
  const std::int64_t bytes_;
  std::int64_t used_ = 0;
};

}  // namespace ballast::tiers
