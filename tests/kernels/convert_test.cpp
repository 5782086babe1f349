#include <gtest/gtest.h>

#include <cfenv>
#include <limits>

#include "tests/kernels/arrays.h"
#include "tests/kernels/each_target.h"

namespace ballast::kernels::testing {
namespace {

// One 16-bit format by its definition.
struct Format {
  Scalar type;
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int infinity() const { return ((1 << exponent_bits) - 1) << fraction_bits; }

  /// The value of non-negative bits up to and including what would stand at infinity's place, were it a number.
  double value(int bits) const {
    const int exponent = bits >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    if (exponent == 0) return std::ldexp(fraction, 1 - bias() - fraction_bits);
    return std::ldexp((1 << fraction_bits) + fraction, exponent - bias() - fraction_bits);
  }
};
constexpr Format kFormats[] = {{Scalar::kBFloat16, 8, 7}, {Scalar::kFloat16, 5, 10}};

std::vector<float> widened(Scalar type, const std::vector<std::uint16_t>& bits) {
  std::vector<float> values(bits.size());
  convert(values.data(), Scalar::kFloat32, bits.data(), type, static_cast<std::int64_t>(bits.size()), 1);
  return values;
}

std::vector<std::uint16_t> narrowed(Scalar type, const std::vector<float>& values) {
  std::vector<std::uint16_t> bits(values.size());
  convert(bits.data(), type, values.data(), Scalar::kFloat32, static_cast<std::int64_t>(bits.size()), 1);
  return bits;
}

TEST(Convert, WidensEveryValueExactlyAndBack) {
  std::vector<std::uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
  for (const Format& format : kFormats) {
    on_each_target([&] {
      const std::vector<float> values = widened(format.type, all);
      const std::vector<std::uint16_t> back = narrowed(format.type, values);
      for (int i = 0; i < 65536; ++i) {
        const int magnitude = i & 0x7fff;
        if (magnitude > format.infinity()) {
          ASSERT_TRUE(std::isnan(values[i])) << name(format.type) << ' ' << i << ' ' << instruction_set();
          ASSERT_GT(back[i] & 0x7fff, format.infinity()) << name(format.type) << ' ' << i << ' ' << instruction_set();
          continue;
        }
        const double want =
            magnitude == format.infinity() ? std::numeric_limits<double>::infinity() : format.value(magnitude);
        ASSERT_EQ(values[i], i & 0x8000 ? -want : want) << name(format.type) << ' ' << i << ' ' << instruction_set();
        ASSERT_EQ(std::signbit(values[i]), (i & 0x8000) != 0);
        ASSERT_EQ(back[i], i) << name(format.type) << ' ' << instruction_set();
      }
    });
  }
}

// Between each two neighbours: the middle goes to the even one, what lies next to the middle to the nearer one. The
// upper neighbour of the largest finite value is infinity.
TEST(Convert, RoundsToNearestEvenBetweenAllNeighbours) {
  for (const Format& format : kFormats) {
    std::vector<float> values;
    std::vector<std::uint16_t> want;
    for (int low = 0; low < format.infinity(); ++low) {
      const auto middle = static_cast<float>((format.value(low) + format.value(low + 1)) / 2);
      ASSERT_EQ(middle, (format.value(low) + format.value(low + 1)) / 2);
      for (const int sign : {0, 0x8000}) {
        for (const auto& [value, bits] :
             {std::pair{std::nextafter(middle, 0.0f), low}, std::pair{middle, low + (low & 1)},
              std::pair{std::nextafter(middle, std::numeric_limits<float>::infinity()), low + 1}}) {
          values.push_back(sign ? -value : value);
          want.push_back(static_cast<std::uint16_t>(sign | bits));
        }
      }
    }
    for (const float huge : {std::numeric_limits<float>::max(), std::numeric_limits<float>::infinity()}) {
      values.push_back(huge);
      want.push_back(static_cast<std::uint16_t>(format.infinity()));
    }
    on_each_target([&] {
      const std::vector<std::uint16_t> got = narrowed(format.type, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(got[i], want[i]) << name(format.type) << ' ' << values[i] << ' ' << instruction_set();
      }
    });
  }
}

TEST(Convert, KeepsNaN) {
  for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7f801fffu}) {
    const std::vector<float> values(37, std::bit_cast<float>(bits));
    for (const Format& format : kFormats) {
      on_each_target([&] {
        for (const std::uint16_t got : narrowed(format.type, values)) {
          ASSERT_GT(got & 0x7fff, format.infinity()) << name(format.type) << ' ' << instruction_set();
        }
      });
    }
  }
}

TEST(Convert, EveryPairLengthAndStart) {
  for (const Scalar to : kScalars) {
    for (const Scalar from : kScalars) {
      for (const std::int64_t n : lengths()) {
        for (int offset = 0; offset < 4; ++offset) {
          const Array source = samples(from, n, offset, 1);
          Array want(to, n, 3 - offset);
          for (std::int64_t i = 0; i < n; ++i) want.set(i, source.get(i));
          on_each_target([&] {
            Array got(to, n, 3 - offset);
            convert(got.data(), to, source.data(), from, n, 2);
            ASSERT_TRUE(got == want) << name(to) << " from " << name(from) << " n " << n << ' ' << instruction_set();
          });
        }
      }
    }
  }
}

#if defined(__x86_64__)
// A thread that flushes denormals, as many training programs set it, gets the same bits, and stays as it is.
TEST(Convert, DenormalsSurviveACallerThatFlushesThem) {
  constexpr unsigned kFlush = 0x8040, kTowardZero = 0x6000;
  const unsigned before = __builtin_ia32_stmxcsr();
  std::uint16_t wide_denormal = 0x0001, narrow = 0;
  float denormal = 0x1p-24f * 3, tiny = 0, sum = 0x1p-140f;
  const float addend = 0x1p-141f;
  const float rounds_up = 1 + 0x1.8p-8f;
  std::uint16_t rounded = 0;
  __builtin_ia32_ldmxcsr(before | kFlush | kTowardZero);
  convert(&tiny, Scalar::kFloat32, &wide_denormal, Scalar::kBFloat16, 1, 1);
  convert(&narrow, Scalar::kFloat16, &denormal, Scalar::kFloat32, 1, 1);
  convert(&rounded, Scalar::kBFloat16, &rounds_up, Scalar::kFloat32, 1, 1);
  accumulate(&sum, Scalar::kFloat32, &addend, Scalar::kFloat32, 1, 1);
  const unsigned after = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(tiny), 0x00010000u);
  EXPECT_EQ(narrow, 3);
  EXPECT_EQ(rounded, 0x3f81);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(sum), std::bit_cast<std::uint32_t>(0x1.8p-140f));
  EXPECT_EQ(after & (kFlush | kTowardZero), kFlush | kTowardZero);
}
#endif

}  // namespace
}  // namespace ballast::kernels::testing
