#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/tiers/swap_ring.h"

namespace ballast {

/// Optimizer states that are not on the device, in chunks: the unit of work of an update and of disk I/O. A chunk is an
/// array of floats, zeros at first, whose parts (master weights, moments) lie one after the other. Driven by one
/// thread, the host lane's.
class StateChunks {
 public:
  /// In host memory. sizes: floats by chunk.
  StateChunks(const std::vector<std::int64_t>& sizes, const std::shared_ptr<Ledger>& ledger);
  /// In one file, behind a ring of buffers. Throws IoError.
  StateChunks(const std::vector<std::int64_t>& sizes, const tiers::SwapOptions& swap, int rank,
              const std::shared_ptr<Ledger>& ledger);

  /// As many in a second file, behind the ring of `beside`, which may not be used again before this one is gone. Throws
  /// IoError.
  StateChunks(StateChunks& beside, const std::shared_ptr<Ledger>& ledger);

  /// The bytes of its extents.
  static std::vector<std::int64_t> extents(const std::vector<std::int64_t>& sizes);

  /// kReplace: every float is written, and the disk isn't asked for what they were.
  enum class Access : std::uint8_t { kRead, kChange, kReplace };
  /// The chunk's floats; the caller's until close(). Waits for the disk where they are there. No more at a time than
  /// the ring has buffers. Throws IoError.
  float* open(int chunk, Access access);
  void close(int chunk, Access access);
  /// Waits until the disk has what was closed.
  void finish();
  /// In host memory: another array in the chunk's place, of its length. The memory of the first ones goes when all of
  /// them are replaced.
  void replace(int chunk, at::Tensor floats);
  /// open(chunk) will come soon.
  void expect(int chunk);

 private:
  std::vector<at::Tensor> on_host_;
  std::optional<tiers::SwapRing> on_disk_;
  Ledger::Entry bytes_;
  std::shared_ptr<Ledger::Entry> staging_bytes_;  // of all that share the ring
};

}  // namespace ballast
