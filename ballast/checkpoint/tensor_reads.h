#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/checkpoint/safetensors.h"

namespace ballast::ckpt {

/// A tensor of a file that is read whole and compared with its checksum, and the part of it that is kept.
struct TensorRead {
  std::shared_ptr<SafetensorsReader> file;
  const TensorInfo* tensor = nullptr;  // of that file's header
  std::uint64_t checksum = 0;
  std::int64_t begin = 0, end = 0;  // bytes of it that are kept; none where they are equal
  std::byte* to = nullptr;          // where byte `begin` of it goes
};

/// Reads them on a few threads, neighbours in a file in one go: while one waits for the disk, others take checksums and
/// the system's fresh memory. What was kept counts only when this returns. IoError of the first, in their order, that
/// fails.
void read_tensors(const std::vector<TensorRead>& reads, Owner owner);

}  // namespace ballast::ckpt
