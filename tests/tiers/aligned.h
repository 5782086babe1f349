#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "ballast/base/math.h"
#include "ballast/tiers/disk_file.h"

namespace ballast::tiers {

/// Memory as disks want it, filled with a pattern of its own.
class Aligned {
 public:
  explicit Aligned(std::int64_t bytes, std::uint32_t seed = 0)
      : bytes_(static_cast<std::size_t>(bytes)),
        data_(static_cast<std::byte*>(std::aligned_alloc(kDiskAlign, round_up(bytes + 1, kDiskAlign)))) {
    fill(seed);
  }
  void fill(std::uint32_t seed) {
    std::uint32_t state = seed * 2654435761u + 12345u;
    for (std::byte& byte : span()) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<std::byte>(state >> 24);
    }
  }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  std::byte& operator[](std::size_t i) const { return data_.get()[i]; }
  bool operator==(const Aligned& other) const {
    return bytes_ == other.bytes_ && std::equal(span().begin(), span().end(), other.span().begin());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace ballast::tiers
