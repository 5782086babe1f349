#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace ballast::tiers {

/// Page-locks memory for copies from and to the device at full speed. False where the device needs none (CPU). Throws
/// MemoryError where the device's driver refuses it.
bool pin(void* data, std::size_t bytes, c10::Device device);
/// Of what pin() returned true for. Never throws: it runs when the memory goes.
void unpin(void* data) noexcept;

}  // namespace ballast::tiers
