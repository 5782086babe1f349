#include "ballast/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "ballast/base/error.h"
#include "ballast/data/permutation.h"

namespace ballast::data {
namespace {

std::vector<std::int64_t> sorted(std::vector<std::int64_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}

std::vector<std::int64_t> draw(Sampler& sampler, std::int64_t count) { return sampler.next(count, 0, 1); }

TEST(Permutation, HoldsEveryIndexOnce) {
  for (std::int64_t n : {1, 2, 3, 4, 5, 16, 17, 100, 1023, 1025, 70000}) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::int64_t> seen;
    const Permutation permutation(n, 42);
    for (std::int64_t i = 0; i < n; ++i) seen.push_back(permutation(i));
    EXPECT_EQ(sorted(seen), all) << n;
  }
}

// Fixed values: a run that is resumed on another machine or by a later version must see the same order.
TEST(Permutation, OrderIsFixedForGood) {
  std::vector<std::int64_t> order;
  for (int i = 0; i < 10; ++i) order.push_back(Permutation(10, 7)(i));
  EXPECT_EQ(order, (std::vector<std::int64_t>{8, 1, 5, 2, 4, 9, 0, 7, 3, 6}));
}

TEST(Permutation, LooksRandom) {
  const std::int64_t n = 20000;
  const Permutation permutation(n, 3);
  double displacement = 0;
  int rises = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    displacement += std::abs(static_cast<double>(permutation(i) - i)) / static_cast<double>(n);
    if (i > 0) rises += permutation(i) > permutation(i - 1);
  }
  EXPECT_NEAR(displacement / static_cast<double>(n), 1.0 / 3, 0.01);  // |x - y| of two uniform places
  EXPECT_NEAR(rises / static_cast<double>(n), 0.5, 0.01);
}

TEST(Sampler, EveryWindowComesOnceAnEpochForAnyNumberOfRanks) {
  for (const int world : {1, 2, 3}) {
    std::vector<Sampler> ranks(static_cast<std::size_t>(world), Sampler(60, 5));
    std::vector<std::int64_t> seen;
    for (int step = 0; step < 60 / (2 * world); ++step)
      for (int rank = 0; rank < world; ++rank)
        for (const std::int64_t index : ranks[static_cast<std::size_t>(rank)].next(2, rank, world))
          seen.push_back(index);
    std::vector<std::int64_t> all(60);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(sorted(seen), all) << world;
    EXPECT_EQ(ranks[0].epoch(), 1);
  }
}

TEST(Sampler, OrderDoesNotDependOnTheNumberOfRanks) {
  Sampler alone(50, 9), first(50, 9), second(50, 9);
  const auto want = draw(alone, 16);
  auto got = first.next(8, 0, 2);
  const auto more = second.next(8, 1, 2);
  got.insert(got.end(), more.begin(), more.end());
  EXPECT_EQ(got, want);
}

TEST(Sampler, EpochsAndSeedsDiffer) {
  Sampler a(40, 1), b(40, 2);
  const auto first = draw(a, 40), second = draw(a, 40);
  EXPECT_NE(first, second);
  EXPECT_EQ(sorted(first), sorted(second));
  EXPECT_NE(first, draw(b, 40));
}

TEST(Sampler, GoesOnWhereItStopped) {
  Sampler whole(23, 4);
  draw(whole, 17);
  const SamplerState state = whole.state();
  const auto want = draw(whole, 30);  // over the end of two epochs
  Sampler resumed(23, 4);
  resumed.restore(state);
  EXPECT_EQ(draw(resumed, 30), want);
  Sampler other(24, 4);
  EXPECT_THROW(other.restore(state), UseError);
  Sampler reseeded(23, 5);
  EXPECT_THROW(reseeded.restore(state), UseError);
}

}  // namespace
}  // namespace ballast::data
