#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ballast/checkpoint/safetensors.h"

namespace ballast::ckpt {

/// A tensor of a file that is read whole and compared with its checksum, and a part of it that is kept.
struct TensorRead {
  std::shared_ptr<SafetensorsReader> file;
  const TensorInfo* tensor = nullptr;  // of that file's header
  std::uint64_t checksum = 0;
  std::int64_t begin = 0, end = 0;  // bytes of it that are kept; none where they are equal
  std::byte* to = nullptr;          // where byte `begin` of it goes
};

/// Reads them on a few threads, in the order of the files' bytes and neighbours in one go, a tensor of which several
/// parts are kept once: while one thread waits for the disk, others take checksums and the system's fresh memory. What
/// was kept counts only when this returns. IoError of the first, in that order, that fails; files in the order in which
/// they are named.
void read_tensors(std::vector<TensorRead> reads, Owner owner);

}  // namespace ballast::ckpt
