#include <gtest/gtest.h>

#include <limits>

#include "tests/kernels/arrays.h"
#include "tests/kernels/each_target.h"

namespace ballast::kernels::testing {
namespace {

TEST(Accumulate, AddsInFp32AndRoundsOnce) {
  for (const Scalar acc_type : kScalars) {
    for (const Scalar x_type : kScalars) {
      for (const std::int64_t n : lengths()) {
        for (int offset = 0; offset < 4; ++offset) {
          const Array start = samples(acc_type, n, offset, 1), x = samples(x_type, n, 3 - offset, 2);
          Array want = start;
          for (std::int64_t i = 0; i < n; ++i) want.set(i, start.get(i) + x.get(i));
          on_each_target([&] {
            Array got = start;
            accumulate(got.data(), acc_type, x.data(), x_type, n, 2);
            ASSERT_TRUE(got == want) << name(acc_type) << " += " << name(x_type) << " n " << n << " offset " << offset
                                     << ' ' << instruction_set();
          });
        }
      }
    }
  }
}

TEST(SumRanks, AddsInRankOrder) {
  for (const Scalar type : kScalars) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const std::int64_t n : lengths()) {
        for (int offset = 0; offset < 4; ++offset) {
          const std::int64_t stride = n + 5;
          const Array in = samples(type, ranks * stride, offset, 3);
          Array want(Scalar::kFloat32, n, offset);
          for (std::int64_t i = 0; i < n; ++i) {
            float sum = in.get(i);
            for (int rank = 1; rank < ranks; ++rank) sum += in.get(rank * stride + i);
            want.set(i, sum);
          }
          on_each_target([&] {
            Array got(Scalar::kFloat32, n, offset);
            sum_ranks(got.floats(), in.data(), type, ranks, stride, n, 3);
            ASSERT_TRUE(got == want) << name(type) << " ranks " << ranks << " n " << n << ' ' << instruction_set();
          });
        }
      }
    }
  }
}

// The definition, one element after the other.
double reference_sum(const Array& x) {
  double sum = 0;
  for (std::int64_t chunk = 0; chunk < x.n(); chunk += 65536) {
    double lanes[32] = {};
    const std::int64_t end = std::min<std::int64_t>(chunk + 65536, x.n());
    for (std::int64_t i = chunk; i < end; ++i) {
      const double value = x.get(i);
      lanes[(i - chunk) % 32] += value * value;
    }
    double part = 0;
    for (const double lane : lanes) part += lane;
    sum += part;
  }
  return sum;
}

TEST(SumSquares, IsTheFixedOrderSumOnEveryTargetAndThreadCount) {
  for (const Scalar type : kScalars) {
    for (const std::int64_t n : lengths()) {
      for (int offset = 0; offset < 4; ++offset) {
        const Array x = samples(type, n, offset, 4);
        const double want = reference_sum(x);
        on_each_target([&] {
          for (const int threads : {1, 2, 3}) {
            ASSERT_EQ(sum_squares(x.data(), type, n, threads), want)
                << name(type) << " n " << n << " offset " << offset << " threads " << threads << ' '
                << instruction_set();
          }
        });
      }
    }
  }
}

TEST(SumSquares, StaysExactWhereFp32WouldNot) {
  // 70 million ones, behind more chunks than one group holds: fp32 stops counting at 16.7 million.
  const std::int64_t n = 70'000'003;
  const std::vector<std::uint16_t> ones(static_cast<std::size_t>(n), 0x3f80);
  EXPECT_EQ(sum_squares(ones.data(), Scalar::kBFloat16, n, 2), static_cast<double>(n));
}

TEST(SumSquares, FiniteElementsGiveAFiniteSum) {
  std::vector<float> x(1000, 3e38f);
  const double square = static_cast<double>(3e38f) * static_cast<double>(3e38f);
  on_each_target([&] {
    const double sum = sum_squares(x.data(), Scalar::kFloat32, 1000, 1);
    EXPECT_NEAR(sum / square, 1000, 1e-9) << instruction_set();
  });
}

TEST(SumSquares, OneNonFiniteElementAnywhereShows) {
  for (const Scalar type : kScalars) {
    for (const std::int64_t n : {1, 31, 33, 67, 65537}) {
      for (const std::int64_t place : {std::int64_t{0}, n / 2, n - 1}) {
        for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()}) {
          Array x = samples(type, n, 0, 5);
          x.set(place, bad);
          on_each_target([&] {
            ASSERT_FALSE(std::isfinite(sum_squares(x.data(), type, n, 2)))
                << name(type) << " n " << n << " place " << place << ' ' << instruction_set();
          });
        }
      }
    }
  }
}

TEST(Reductions, ThreadsBeyondTheChunksAndEmptyRangesAreFine) {
  float x[3] = {1, 2, 3};
  EXPECT_EQ(sum_squares(x, Scalar::kFloat32, 3, 64), 14);
  EXPECT_EQ(sum_squares(x, Scalar::kFloat32, 3, 0), 14);
  EXPECT_EQ(sum_squares(nullptr, Scalar::kFloat32, 0, 2), 0);
  accumulate(nullptr, Scalar::kFloat32, nullptr, Scalar::kBFloat16, 0, 2);
}

}  // namespace
}  // namespace ballast::kernels::testing
