// Page-locked memory, where there is a CUDA device; elsewhere the program exits with 77.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ballast/tiers/host_arena.h"

namespace ballast::tiers {
namespace {

constexpr std::int64_t kNumel = 3'000'001;

TEST(Pin, AnArenaIsPageLockedWhereAskedForAndCopiesBothWays) {
  const c10::Device device(at::kCUDA, 0);
  at::empty({1}, at::TensorOptions(device));  // is_pinned() says no until LibTorch has begun to use the device
  for (int round = 0; round < 3; ++round) {   // what was page-locked can be so again when the system reuses it
    HostArena arena(2 * HostArena::bytes_of(kNumel, at::kFloat), true, device);
    EXPECT_TRUE(arena.pinned());
    const at::Tensor from = arena.allocate(kNumel, at::kFloat), to = arena.allocate(kNumel, at::kFloat);
    EXPECT_TRUE(from.is_pinned());
    EXPECT_TRUE(to.is_pinned());
    from.copy_(at::arange(kNumel, at::kFloat));
    const at::Tensor there = at::empty({kNumel}, at::TensorOptions().device(device));
    there.copy_(from, true);
    there.add_(1);
    to.copy_(there, true);
    EXPECT_TRUE(at::equal(there.cpu(), to)) << "a synchronising copy comes behind the others on the stream";
    EXPECT_TRUE(at::equal(from + 1, to));
  }
}

TEST(Pin, WithoutPinMemoryNothingIs) {
  HostArena arena(HostArena::bytes_of(kNumel, at::kFloat), false, c10::Device(at::kCUDA, 0));
  EXPECT_FALSE(arena.pinned());
  EXPECT_FALSE(arena.allocate(kNumel, at::kFloat).is_pinned());
}

}  // namespace
}  // namespace ballast::tiers
