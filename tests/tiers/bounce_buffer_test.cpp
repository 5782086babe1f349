// On a CUDA device through the blocks, which several parts pass; the same calls serve a CPU, where there is nothing to
// pass.
#include "ballast/tiers/bounce_buffer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace ballast::tiers {
namespace {

constexpr std::int64_t kNumel = 13'000'001;  // four parts of fp32, the last one short

void comes_and_goes(c10::Device device) {
  const at::Tensor values = at::arange(kNumel, at::kFloat);
  BounceBuffer buffer(device, /*pin=*/true);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor there = at::zeros({kNumel}, at::TensorOptions(device).dtype(type));
    buffer.write(values, there);
    EXPECT_TRUE(at::equal(there.cpu(), values.to(type)));
    there.add_(1);
    std::vector<at::Tensor> parts;
    buffer.read(there.view({kNumel, 1}), [&](const at::Tensor& part) {
      EXPECT_TRUE(part.is_cpu());
      EXPECT_EQ(part.dim(), 1);
      parts.push_back(part.clone());
    });
    EXPECT_EQ(parts.size() > 1, !device.is_cpu());
    EXPECT_TRUE(at::equal(at::cat(parts), there.cpu()));
  }
  const at::Tensor none = at::zeros({0}, at::TensorOptions(device));
  buffer.write(at::zeros({0}), none);
  buffer.read(none, [](const at::Tensor& part) { EXPECT_EQ(part.numel(), 0); });
}

TEST(BounceBuffer, EveryPartComesAndGoes) {
  comes_and_goes(c10::kCPU);
  comes_and_goes(c10::Device(c10::kCUDA, 0));
}

}  // namespace
}  // namespace ballast::tiers
