#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "ballast/base/ledger.h"
#include "ballast/tiers/device_stream.h"

namespace ballast {

/// Host buffers through which what a pass writes on the host goes to device memory, the copies running beside the next
/// pass. Where the destination is host memory itself there is nothing in between. Driven by one thread.
class UploadRing {
 public:
  /// slot_bytes: of the longest destination.
  UploadRing(std::int64_t slot_bytes, bool pin_memory, c10::Device device, const std::shared_ptr<Ledger>& ledger);

  /// What it takes of the host's memory.
  static std::int64_t bytes(std::int64_t slot_bytes, c10::DeviceType device) {
    return device == c10::DeviceType::CPU ? 0 : kSlots * slot_bytes;
  }

  /// unit: its name, for the trace. Where to write what shall be in `to`: `to` itself, or a buffer of its size and
  /// dtype whose last copy has ended.
  at::Tensor stage(const at::Tensor& to, std::string_view unit);
  /// Queues the copy on the current stream.
  void send(const at::Tensor& staged, const at::Tensor& to, std::string_view unit);

 private:
  static constexpr int kSlots = 4;
  struct Slot {
    at::Tensor memory;
    tiers::DeviceEvent copied;
  };
  std::array<Slot, kSlots> slots_;
  std::size_t last_ = 0;  // slot that stage() handed out
  c10::Device device_;
  Ledger::Entry bytes_;
};

}  // namespace ballast
