#include "ballast/base/checksum.h"

#include <gtest/gtest.h>

#include <vector>

namespace ballast {
namespace {

std::vector<std::byte> bytes(std::size_t n) {
  std::vector<std::byte> made(n);
  for (std::size_t i = 0; i < n; ++i) made[i] = static_cast<std::byte>(i * 31 + i / 251);
  return made;
}

TEST(Checksum, IsThatOfThePublishedAlgorithm) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);  // XXH3's own value for the empty input, seed 0
  std::vector<std::byte> data = bytes(1 << 20);
  const std::uint64_t whole = checksum(data);
  for (const std::size_t at : {std::size_t{0}, std::size_t{12345}, (std::size_t{1} << 20) - 1}) {
    data[at] ^= std::byte{0x10};
    EXPECT_NE(checksum(data), whole) << at;
    data[at] ^= std::byte{0x10};
  }
  EXPECT_EQ(checksum(data), whole);
}

TEST(Checksum, DoesNotDependOnThePartsInWhichDataComes) {
  const std::vector<std::byte> data = bytes(100'003);
  for (const std::size_t part : {1, 7, 240, 4096, 100'003}) {
    Checksum running;
    for (std::size_t at = 0; at < data.size(); at += part)
      running.add(std::span(data).subspan(at, std::min(part, data.size() - at)));
    EXPECT_EQ(running.value(), checksum(data)) << part;
  }
  EXPECT_EQ(Checksum().value(), checksum({}));
}

TEST(Checksum, ComesBackFromItsText) {
  for (const std::uint64_t value : {std::uint64_t{0}, std::uint64_t{0xab}, ~std::uint64_t{0}}) {
    EXPECT_EQ(checksum_text(value).size(), 16U);
    EXPECT_EQ(checksum_of_text(checksum_text(value)), value);
  }
  for (const char* bad : {"", "12", "00000000000000000", "000000000000000g", "-00000000000000f", "0x00000000000000"})
    EXPECT_EQ(checksum_of_text(bad), std::nullopt) << bad;
}

}  // namespace
}  // namespace ballast
