#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels::testing {

inline constexpr Scalar kScalars[] = {Scalar::kFloat32, Scalar::kBFloat16, Scalar::kFloat16};
inline constexpr const char* kScalarNames[] = {"fp32", "bf16", "fp16"};
inline const char* name(Scalar type) { return kScalarNames[static_cast<int>(type)]; }

/// Every length up to a few vectors, then one less, equal and one more than what loops and chunks are cut at.
inline std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t n = 0; n <= 67; ++n) all.push_back(n);
  for (std::int64_t n : {255, 256, 257, 1023, 1024, 1025, 65535, 65536, 65537, 200003}) all.push_back(n);
  return all;
}

/// n elements that start `offset` elements behind a 64-byte boundary, between guard bytes. PyTorch's scalar types
/// convert: an implementation other than the one under test.
class Array {
 public:
  Array(Scalar type, std::int64_t n, int offset = 0) : type_(type), n_(n), offset_(offset) {
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(64, size())));
    std::memset(bytes_.get(), kGuard, size());
  }
  Array(const Array& from) : Array(from.type_, from.n_, from.offset_) {
    std::memcpy(bytes_.get(), from.bytes_.get(), size());
  }
  Array(Array&&) = default;

  void* data() { return bytes_.get() + start(); }
  const void* data() const { return bytes_.get() + start(); }
  float* floats() { return static_cast<float*>(data()); }
  Scalar type() const { return type_; }
  std::int64_t n() const { return n_; }

  float get(std::int64_t i) const {
    switch (type_) {
      case Scalar::kFloat32:
        return static_cast<const float*>(data())[i];
      case Scalar::kBFloat16:
        return static_cast<const c10::BFloat16*>(data())[i];
      case Scalar::kFloat16:
        return static_cast<const c10::Half*>(data())[i];
    }
    return 0;
  }
  void set(std::int64_t i, float value) {
    switch (type_) {
      case Scalar::kFloat32:
        static_cast<float*>(data())[i] = value;
        break;
      case Scalar::kBFloat16:
        static_cast<c10::BFloat16*>(data())[i] = value;
        break;
      case Scalar::kFloat16:
        static_cast<c10::Half*>(data())[i] = value;
        break;
    }
  }

  /// Whether nothing outside [0, n) was written.
  bool guards_intact() const {
    const std::size_t end = start() + static_cast<std::size_t>(n_) * width();
    for (std::size_t i = 0; i < size(); ++i) {
      if ((i < start() || i >= end) && bytes_[i] != static_cast<std::byte>(kGuard)) return false;
    }
    return true;
  }
  /// Same bits, guards included.
  friend bool operator==(const Array& a, const Array& b) {
    return a.size() == b.size() && std::memcmp(a.bytes_.get(), b.bytes_.get(), a.size()) == 0;
  }

 private:
  static constexpr int kGuard = 0x5a;
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::size_t width() const { return type_ == Scalar::kFloat32 ? 4 : 2; }
  std::size_t start() const { return 64 + static_cast<std::size_t>(offset_) * width(); }
  std::size_t size() const { return (start() + static_cast<std::size_t>(n_) * width() + 64 + 63) / 64 * 64; }

  Scalar type_;
  std::int64_t n_;
  int offset_;
  std::unique_ptr<std::byte[], Free> bytes_;
};

/// Reproducible values: most of ordinary size, some zero, tiny (denormal in fp16 and in fp32) or large.
inline float sample(std::int64_t i, std::uint64_t salt) {
  std::uint64_t x = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u + salt * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  const float unit = static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) / (1 << 23);
  switch (x % 16) {
    case 0:
      return 0;
    case 1:
      return unit * 1e-6f;
    case 2:
      return unit * 1e-40f;
    case 3:
      return unit * 3e4f;
    default:
      return unit * 2;
  }
}

inline Array samples(Scalar type, std::int64_t n, int offset, std::uint64_t salt) {
  Array array(type, n, offset);
  for (std::int64_t i = 0; i < n; ++i) array.set(i, sample(i, salt));
  return array;
}

/// How many representable values apart; 0 and -0 are the same, NaN is as far as possible from all but NaN.
inline std::int64_t ulps(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : INT64_MAX;
  const auto place = [](float x) -> std::int64_t {
    const auto bits = std::bit_cast<std::int32_t>(x);
    return bits >= 0 ? bits : -static_cast<std::int64_t>(bits & 0x7fffffff);
  };
  return std::abs(place(a) - place(b));
}

}  // namespace ballast::kernels::testing
