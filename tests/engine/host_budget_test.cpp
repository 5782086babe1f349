// Too little host memory is an error at the start, with what is needed by kind and what would fit.
#include "ballast/engine/host_budget.h"

#include <gtest/gtest.h>

#include "ballast/base/error.h"
#include "ballast/engine/policies.h"

namespace ballast {
namespace {

constexpr std::int64_t kNumel = std::int64_t{1} << 20;  // of each of 4 units

Layout four_units() {
  std::vector<ParameterInfo> parameters;
  for (const char* name : {"a", "b", "c", "d"}) {
    ParameterInfo info;
    info.names = {std::string(name) + ".p"};
    info.shape = {kNumel};
    info.numel = kNumel;
    info.compute_dtype = c10::kBFloat16;
    info.unit = name;
    parameters.push_back(std::move(info));
  }
  return make_layout(std::move(parameters), 2);
}

Config offloaded() {
  Config config;
  config.bf16 = true;
  config.zero.stage = 2;
  config.zero.offload_optimizer.device = OffloadDevice::kCpu;
  return config;
}

std::string refusal(const Config& config, int ranks, std::int64_t available) {
  try {
    check_host_budget(four_units(), config, {.world = 2}, ranks, available);
  } catch (const MemoryError& e) {
    return e.what();
  }
  return "";
}

// A rank of two keeps half of 4 Mi elements: 12 bytes each for Adam's states and 4 for a sum.
constexpr std::int64_t kRank = 2 * kNumel * 16;

TEST(HostBudget, WhatFitsIsSilent) {
  EXPECT_EQ(refusal(offloaded(), 1, kRank), "");
  EXPECT_EQ(refusal(offloaded(), 2, 2 * kRank), "");
  EXPECT_EQ(refusal(Config(), 2, 0), "") << "nothing is placed on the host";
}

TEST(HostBudget, TooLittleNamesNeedsAndTheCheapestChangeThatFits) {
  const std::string half = refusal(offloaded(), 1, kRank / 2);
  for (const char* part : {"optimizer 24.0 MiB", "grads 8.00 MiB", "16.0 MiB", "offload_optimizer.ratio = 0.50 fits"})
    EXPECT_NE(half.find(part), std::string::npos) << part << " in: " << half;
  const std::string both = refusal(offloaded(), 2, kRank);
  for (const char* part : {"optimizer 48.0 MiB", "2 ranks on this machine", "ratio = 0.50 fits"})
    EXPECT_NE(both.find(part), std::string::npos) << part << " in: " << both;
  Config nvme = offloaded();
  nvme.zero.offload_optimizer.device = OffloadDevice::kNvme;
  nvme.zero.offload_optimizer.nvme_path = "/";
  EXPECT_NE(refusal(nvme, 1, 1000).find("use more machines"), std::string::npos);
}

// Off the device are one unit's states and sums and everybody's parameters: 512 Ki elements a rank and unit, in chunks
// of 64 Ki on disk.
TEST(HostBudget, OntoTheDiskGoesFirstWhatTravelsLeast) {
  Config config = offloaded();
  config.zero.stage = 3;
  config.zero.sub_group_size = 64 << 10;
  config.zero.offload_optimizer.ratio = .25;
  config.zero.offload_param = {.device = OffloadDevice::kCpu, .buffer_count = 2};
  constexpr std::int64_t kMiB = 1 << 20;
  const std::int64_t parameters = 4 * kMiB, sums = 2 * kMiB, states = 6 * kMiB;
  const std::int64_t shards_ring = 2 * kMiB, sums_ring = kMiB, states_ring = 3 * kMiB;
  const std::string device = "\"nvme\" as device of zero_optimization.offload_optimizer";
  EXPECT_EQ(refusal(config, 1, parameters + sums + states), "");
  const auto expect_advice = [&](std::int64_t available, const std::string& advice) {
    const std::string told = refusal(config, 1, available);
    EXPECT_NE(told.find(advice), std::string::npos) << advice << " in: " << told;
  };
  expect_advice(parameters + sums + states_ring, device + " fits");
  expect_advice(parameters + sums_ring + states_ring, device + " and offload_gradients fits");
  expect_advice(shards_ring + sums_ring + states_ring,
                device + " and offload_gradients and offload_param fits, with 6.00 MiB");
  expect_advice(shards_ring + sums_ring + states_ring - 1, "use more machines");
}

}  // namespace
}  // namespace ballast
