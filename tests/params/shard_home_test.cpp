// Shards come back as they were left, wherever they rest, while one thread changes some and another reads others.
#include "ballast/params/shard_home.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/layout/layout.h"

namespace ballast {
namespace {

using Access = ShardHome::Access;

// Units of 64, 128, ... elements a rank of one.
Layout layout_of(int units) {
  std::vector<ParameterInfo> parameters;
  for (int u = 0; u < units; ++u) {
    ParameterInfo info;
    info.unit = "u" + std::to_string(u);
    info.names = {info.unit + ".w"};
    info.shape = {64 * (u + 1)};
    info.numel = 64 * (u + 1);
    parameters.push_back(info);
  }
  return make_layout(std::move(parameters), 1);
}

ShardPolicy policy_of(Tier tier, std::int64_t in_host = 0, int buffers = 3) {
  return {.tier = tier,
          .in_host = in_host,
          .longest = 1'000'000,
          .swap = {.nvme_path = std::filesystem::temp_directory_path(), .buffers = buffers}};
}

double value_of(ShardHome& home, int unit) {
  double value = 0;
  home.lend(unit, Access::kRead, [&](const at::Tensor& shard) -> tiers::DeviceEvent {
    EXPECT_EQ(shard.numel(), 64 * (unit + 1));
    EXPECT_EQ(shard.min().item<double>(), shard.max().item<double>());
    value = shard[0].item<double>();
    return {};
  });
  return value;
}

void fill(ShardHome& home, int unit, Access access, double value) {
  home.lend(unit, access, [&](const at::Tensor& shard) -> tiers::DeviceEvent {
    shard.fill_(value);
    return {};
  });
}

TEST(ShardHome, KeepsValuesOnEveryTier) {
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme})
    for (const std::int64_t in_host : {0, 64, 200}) {
      const Layout layout = layout_of(6);
      ShardHome home(layout, policy_of(tier, in_host), 0, c10::kCPU, Ledger::create());
      for (int u = 0; u < 6; ++u) home.set_initial(u, at::full({64 * (u + 1)}, u + 1.0));
      for (int round = 0; round < 3; ++round) {
        for (int u = 0; u < 6; ++u) {
          home.expect((u + 1) % 6);
          EXPECT_EQ(value_of(home, u), u + 1 + 10 * round);
        }
        for (int u = 5; u >= 0; --u)
          fill(home, u, u % 2 == 0 ? Access::kReplace : Access::kChange, u + 1 + 10 * (round + 1));
      }
      home.finish();
    }
}

TEST(ShardHome, TheFirstUnitsStayInHostMemoryUpToTheLimit) {
  const Layout layout = layout_of(4);
  const auto tiers = place_shards(layout, policy_of(Tier::kNvme, 64 + 128));
  EXPECT_EQ(tiers, (std::vector<Tier>{Tier::kHost, Tier::kHost, Tier::kNvme, Tier::kNvme}));
  const auto ledger = Ledger::create();
  {
    ShardHome home(layout, policy_of(Tier::kNvme, 64 + 128), 0, c10::kCPU, ledger);
    for (int u = 0; u < 4; ++u) home.set_initial(u, at::zeros({64 * (u + 1)}));
    EXPECT_EQ(ledger->cell(MemoryKind::kParams, Tier::kHost).now, 4 * (64 + 128));
    EXPECT_EQ(ledger->cell(MemoryKind::kParams, Tier::kNvme).now, 2 * 4096);
    EXPECT_EQ(ledger->cell(MemoryKind::kStaging, Tier::kHost).now, 2 * 4096) << "a third buffer would stay empty";
  }
  EXPECT_EQ(ledger->total(Tier::kNvme).now, 0);
  ShardPolicy short_buffers = policy_of(Tier::kNvme);
  short_buffers.longest = 200;
  EXPECT_THROW(place_shards(layout, short_buffers), ConfigError);
}

// As in training: the host lane changes units that a fault doesn't want yet.
TEST(ShardHome, OneThreadReadsWhileAnotherChangesOthers) {
  const Layout layout = layout_of(8);
  ShardHome home(layout, policy_of(Tier::kNvme, 0, 2), 0, c10::kCPU, Ledger::create());
  for (int u = 0; u < 8; ++u) home.set_initial(u, at::full({64 * (u + 1)}, 1.0));
  std::thread changes([&] {
    for (int round = 2; round < 40; ++round)
      for (int u = 0; u < 4; ++u) {
        EXPECT_EQ(value_of(home, u), round - 1);
        fill(home, u, Access::kChange, round);
      }
  });
  for (int round = 0; round < 40; ++round)
    for (int u = 4; u < 8; ++u) {
      home.expect(4 + (u + 1) % 4);
      EXPECT_EQ(value_of(home, u), 1);
    }
  changes.join();
  EXPECT_EQ(home.failure(), nullptr);
}

}  // namespace
}  // namespace ballast
