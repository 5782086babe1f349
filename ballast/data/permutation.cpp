#include "ballast/data/permutation.h"

#include <bit>

namespace ballast::data {

Permutation::Permutation(std::int64_t n, std::uint64_t key)
    : n_(n), key_(key), half_bits_((std::bit_width(static_cast<std::uint64_t>(n - 1)) + 1) / 2) {}

std::int64_t Permutation::operator()(std::int64_t i) const {
  constexpr int kRounds = 6;
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto x = static_cast<std::uint64_t>(i);
  do {
    std::uint64_t left = x >> half_bits_, right = x & mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mix(right ^ mix(key_ + static_cast<std::uint64_t>(round))) & mask);
      left = right;
      right = next;
    }
    x = (left << half_bits_) | right;
  } while (x >= static_cast<std::uint64_t>(n_));  // the domain is less than 4 n: under 4 walks on average
  return static_cast<std::int64_t>(x);
}

}  // namespace ballast::data
