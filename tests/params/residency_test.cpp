#include "ballast/params/residency.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

constexpr std::int64_t kWidth = 64;  // a shard; a unit is two of them

Layout four_units() {
  std::vector<ParameterInfo> parameters;
  for (const char* name : {"a", "b", "c", "d"}) {
    ParameterInfo info;
    info.names = {std::string(name) + ".w"};
    info.unit = name;
    info.shape = {2 * kWidth};
    info.numel = 2 * kWidth;
    parameters.push_back(info);
  }
  return make_layout(std::move(parameters), 2);
}

/// Four sharded units on one rank of two; every element of unit u is u + 1.
struct Sharded {
  Sharded(const World& world, std::int64_t units_live, std::int64_t units_ahead)
      : rounds(world.communicator("agree", at::kCPU), 0,
               [this](int unit) { return layout.units[static_cast<std::size_t>(unit)].name; }),
        shards(layout, {}, world.rank(), at::kCPU, ledger),
        residency(layout, shards, rounds, world.communicator("gather", at::kCPU), at::kCPU, ledger,
                  {units_live * 2 * kWidth, units_ahead * 2 * kWidth}) {
    for (int u = 0; u < 4; ++u) {
      const at::Tensor full = at::full({2 * kWidth}, u + 1.0);
      shards.set_initial(u, full.narrow(0, world.rank() * kWidth, kWidth));
      parameters.push_back(full.view({2, kWidth}));
      residency.adopt(u, full, {{parameters.back()}}, false);
    }
  }
  ~Sharded() { residency.abandon(); }

  double sum(int unit) { return parameters[static_cast<std::size_t>(unit)].sum().item<double>(); }
  std::int64_t gathered_bytes() const { return ledger->cell(MemoryKind::kGathered, Tier::kDevice).now; }

  Layout layout = four_units();
  std::shared_ptr<Ledger> ledger = Ledger::create();
  Rounds rounds;
  ShardHome shards;
  Residency residency;
  std::vector<at::Tensor> parameters;
};

TEST(Residency, AnOperatorFindsTheValuesAndTheBoundHolds) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 2, 0);
    for (int pass = 0; pass < 3; ++pass)
      for (int unit : {0, 1, 2, 3, 3, 2, 1, 0}) EXPECT_EQ(sharded.sum(unit), 2 * kWidth * (unit + 1)) << unit;
    EXPECT_EQ(sharded.ledger->cell(MemoryKind::kGathered, Tier::kDevice).peak, 2 * 2 * kWidth * 4);
    // 0 1 2 3 | 3 2 hit, 1 0 fault: six faults a pass, two fewer where the last pass left 1 and 0 mapped.
    EXPECT_EQ(sharded.residency.faults(), 6 + 4 + 4);
  });
}

TEST(Residency, OneOperatorKeepsAllItsInputsBeyondTheBound) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 1, 0);
    const at::Tensor all = at::cat(sharded.parameters);
    EXPECT_EQ(all.sum().item<double>(), 2 * kWidth * (1 + 2 + 3 + 4));
    EXPECT_EQ(sharded.gathered_bytes(), 4 * 2 * kWidth * 4);
    sharded.residency.close(0);
    sharded.residency.open_after(0, {});
    sharded.sum(0);
    EXPECT_EQ(sharded.gathered_bytes(), 2 * kWidth * 4) << "the next fault is back within the bound";
  });
}

TEST(Residency, TheSecondPassIsPrefetched) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 2, 1);
    for (int pass = 0; pass < 3; ++pass)
      for (int unit : {0, 1, 2, 3}) EXPECT_EQ(sharded.sum(unit), 2 * kWidth * (unit + 1));
    EXPECT_GE(sharded.residency.prefetched(), 6);
    EXPECT_EQ(sharded.residency.faults() + sharded.residency.prefetched(), 12);
  });
}

// What ends a gather may run operators on the unit, which an observer must not meet under the residency's lock.
TEST(Residency, AUnitThatCameAheadOfAnyUseLeaves) {
  testing::run_ranks(
      2,
      [](const World& world) {
        Sharded sharded(world, 2, 1);
        for (int pass = 0; pass < 2; ++pass)
          for (int unit : {0, 1, 2, 3}) EXPECT_EQ(sharded.sum(unit), 2 * kWidth * (unit + 1));
        ASSERT_EQ(sharded.sum(0), 2 * kWidth);
        ASSERT_EQ(sharded.gathered_bytes(), 2 * 2 * kWidth * 4) << "unit 1 is ahead";
        sharded.residency.close(1);
        EXPECT_EQ(sharded.gathered_bytes(), 2 * kWidth * 4);
        sharded.residency.open_after(1, {});
        EXPECT_EQ(sharded.sum(1), 2 * kWidth * 2);
      },
      testing::thread_options());
}

TEST(Residency, ANewShardReplacesTheMappedCopy) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 4, 0);
    EXPECT_EQ(sharded.sum(0), 2 * kWidth);
    sharded.residency.hold(1);
    sharded.residency.let_go(1);
    sharded.residency.close(0);
    sharded.residency.open_after(0, {});
    EXPECT_EQ(sharded.gathered_bytes(), 2 * kWidth * 4) << "unit 1 stays";
    EXPECT_EQ(sharded.sum(0), 2 * kWidth);
  });
}

TEST(Residency, AWriteThatWouldBeLostIsAnError) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 4, 0);
    sharded.parameters[2].add_(1);
    EXPECT_THROW(sharded.residency.close(2), UseError);
  });
}

TEST(Residency, AWritePastTheVersionCounterIsSeen) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 4, 0);
    EXPECT_EQ(sharded.parameters[2].variable_data().sum().item<double>(), 2 * kWidth * 3);
    EXPECT_FALSE(sharded.residency.lost_write(2));
    sharded.parameters[2].variable_data()[1].add_(1);
    EXPECT_EQ(sharded.residency.lost_write(2), std::size_t{0});
    EXPECT_FALSE(sharded.residency.lost_write(1));
    sharded.residency.accept_write(2, 0);
    EXPECT_FALSE(sharded.residency.lost_write(2));
    sharded.parameters[2].variable_data().zero_();
    EXPECT_THROW(sharded.residency.close(2), UseError);
  });
}

TEST(Residency, DifferentUnitsOnTwoRanksAreNamedOnBoth) {
  testing::run_ranks(2, [](const World& world) {
    Sharded sharded(world, 4, 0);
    EXPECT_ANY_THROW(sharded.sum(world.rank() == 0 ? 1 : 3));
    ASSERT_TRUE(sharded.residency.failure());
    try {
      std::rethrow_exception(sharded.residency.failure());
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("unit b"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("unit d"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace ballast
