#include "ballast/tiers/host_arena.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "ballast/base/error.h"

namespace ballast::tiers {
namespace {

TEST(HostArena, HandsOutAlignedZerosOfItsPlanAndNoMore) {
  const std::int64_t plan = HostArena::bytes_of(1000, at::kFloat) + HostArena::bytes_of(0, at::kFloat) +
                            HostArena::bytes_of(3'000'000, at::kBFloat16);
  EXPECT_EQ(plan, 4096 + 0 + 6'000'640);
  HostArena arena(plan, true, at::kCPU);
  EXPECT_FALSE(arena.pinned()) << "a CPU needs no page-locked memory";
  const at::Tensor a = arena.allocate(1000, at::kFloat), none = arena.allocate(0, at::kFloat),
                   b = arena.allocate(3'000'000, at::kBFloat16);
  EXPECT_EQ(arena.left(), 0);
  EXPECT_EQ(a.sizes(), (std::vector<std::int64_t>{1000}));
  EXPECT_EQ(none.numel(), 0);
  EXPECT_EQ(b.scalar_type(), at::kBFloat16);
  for (const at::Tensor& tensor : {a, b}) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 4096, 0u);
  EXPECT_EQ(static_cast<char*>(b.data_ptr()) - static_cast<char*>(a.data_ptr()), 4096);
  const auto* words = static_cast<const std::uint16_t*>(b.data_ptr());
  EXPECT_EQ(std::count(words, words + 3'000'000, 0), 3'000'000);
  try {
    arena.allocate(1, at::kFloat);
    FAIL();
  } catch (const MemoryError& e) {
    EXPECT_STREQ(e.what(), "[tiers.host_arena] the plan has no room left (wanted 4096, left 0 of 6004736 bytes)");
  }
}

TEST(HostArena, LivesAsLongAsAnyTensorInIt) {
  std::optional<HostArena> arena(std::in_place, 2 * 4096, false, at::kCPU);
  std::optional<at::Tensor> first = arena->allocate(1024, at::kFloat);
  const at::Tensor second = arena->allocate(1024, at::kFloat);
  auto* values = static_cast<float*>(second.data_ptr());
  for (int i = 0; i < 1024; ++i) values[i] = static_cast<float>(i);
  arena.reset();
  first.reset();
  const at::Tensor view = second.view({32, 32});
  EXPECT_EQ(static_cast<float*>(view.data_ptr())[1023], 1023.0f);
}

TEST(HostArena, WithoutBytesIsEmpty) {
  HostArena arena(0, true, at::kCPU);
  EXPECT_EQ(arena.allocate(0, at::kFloat).numel(), 0);
}

TEST(HostArena, RefusesWhatTheSystemCannotMap) {
  EXPECT_THROW(HostArena(std::int64_t{1} << 60, false, at::kCPU), MemoryError);
}

}  // namespace
}  // namespace ballast::tiers
