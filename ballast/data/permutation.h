#pragma once

#include <cstdint>

namespace ballast::data {

/// A pseudo-random order of 0..n-1 that needs no table: a Feistel network (Luby and Rackoff, 1988) on the smallest even
/// number of bits that holds n, walked until it falls inside (Black and Rogaway, 2002). The same on every machine.
class Permutation {
 public:
  /// n: 1 to 2^62. Different keys give unrelated orders.
  Permutation(std::int64_t n, std::uint64_t key);
  /// The index at place i, 0 <= i < n. Every index comes once.
  std::int64_t operator()(std::int64_t i) const;

 private:
  std::int64_t n_;
  std::uint64_t key_;
  int half_bits_;
};

/// A well mixed 64-bit hash (the finalizer of SplitMix64, Steele et al., 2014).
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace ballast::data
