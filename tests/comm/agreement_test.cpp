#include "ballast/comm/agreement.h"

#include <gtest/gtest.h>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

using testing::run_ranks;

TEST(Agreement, EveryRankSeesEveryMessageInRankOrder) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    run_ranks(ranks, [](const World& world) {
      Agreement agreement(world.communicator("agree", at::kCPU), 70);
      ASSERT_EQ(agreement.words(), 2);
      for (int round = 1; round <= 3; ++round) {
        const int rank = world.rank();
        AgreementMessage mine;
        mine.kind = 10 + rank;  // ranks in different calls still meet
        mine.unit = 1u << 31 | rank;
        mine.sequence = 999;  // ignored
        mine.backwards = rank * 100 + round;
        mine.micro_batches = -rank;
        mine.window = std::int64_t{1} << 40;
        mine.weight = rank + 0.1;
        mine.flags = ~std::uint64_t{0} - rank;
        mine.bits = {std::uint64_t{1} << rank, std::uint64_t{1} << 5};
        const auto all = agreement.round(mine);
        ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
        for (int peer = 0; peer < world.size(); ++peer) {
          EXPECT_EQ(all[peer].kind, 10u + peer);
          EXPECT_EQ(all[peer].unit, 1u << 31 | peer);
          EXPECT_EQ(all[peer].sequence, static_cast<std::uint64_t>(round));
          EXPECT_EQ(all[peer].backwards, peer * 100 + round);
          EXPECT_EQ(all[peer].micro_batches, -peer);
          EXPECT_EQ(all[peer].window, std::int64_t{1} << 40);
          EXPECT_EQ(all[peer].weight, peer + 0.1);
          EXPECT_EQ(all[peer].flags, ~std::uint64_t{0} - peer);
          EXPECT_TRUE(all[peer].bit(peer) && all[peer].bit(69));
          EXPECT_FALSE(all[peer].bit(peer + 1) || all[peer].bit(68));
        }
      }
    });
  }
}

TEST(Agreement, AnEmptyBitmapIsAllZeros) {
  run_ranks(2, [](const World& world) {
    Agreement agreement(world.communicator("agree", at::kCPU), 65), none(world.communicator("none", at::kCPU), 0);
    AgreementMessage mine;
    if (world.rank() == 0) mine.bits = {7, 1};
    agreement.round(mine);
    const auto all = agreement.round(AgreementMessage{});  // nothing is left over from the round before
    EXPECT_EQ(all[0].bits, (std::vector<std::uint64_t>{0, 0}));
    EXPECT_EQ(all[1].bits, (std::vector<std::uint64_t>{0, 0}));
    EXPECT_TRUE(none.round(AgreementMessage{})[1].bits.empty());
    mine.bits = {1, 2, 3};
    EXPECT_THROW(agreement.round(mine), UseError);
  });
}

TEST(Agreement, ExchangesNumbersOfAnyLength) {
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [](const World& world) {
      Agreement agreement(world.communicator("agree", at::kCPU), 1);
      for (const std::int64_t length : {3, 0, 1, 1000, 2}) {
        std::vector<double> mine;
        for (std::int64_t i = 0; i < length; ++i) mine.push_back(world.rank() + i / 7.0);
        const auto all = agreement.exchange(mine);
        ASSERT_EQ(all.size(), static_cast<std::size_t>(world.size()));
        for (int peer = 0; peer < world.size(); ++peer) {
          ASSERT_EQ(all[peer].size(), static_cast<std::size_t>(length));
          for (std::int64_t i = 0; i < length; ++i) EXPECT_EQ(all[peer][i], peer + i / 7.0);
        }
      }
    });
  }
}

TEST(Agreement, RanksInDifferentRoundsFindOut) {
  run_ranks(2, [](const World& world) {
    const auto comm = world.communicator("agree", at::kCPU);
    Agreement first(comm, 1), second(comm, 1);
    first.round(AgreementMessage{});
    AgreementMessage mine;
    mine.kind = 4 + world.rank();
    try {
      (world.rank() == 0 ? first : second).round(mine);
      ADD_FAILURE() << "rank " << world.rank();
    } catch (const CommError& error) {
      EXPECT_STREQ(error.what(),
                   "[comm.agree] ranks are in different rounds (rank 0: round 2 kind 4, rank 1: round 1 kind 5)");
    }
  });
}

}  // namespace
}  // namespace ballast
