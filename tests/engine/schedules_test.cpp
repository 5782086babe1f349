// Random schedules of calls, each against a plain model of what the calls mean.

#include <gtest/gtest.h>

#include <cstdlib>

#include "ballast/comm/testing.h"
#include "tests/engine/support/player.h"

namespace ballast::testing {
namespace {

constexpr int kSchedules = 500;

// Schedules seed, seed + 4, ...: a quarter of them on each number of ranks.
void play_on(int ranks) {
  // BALLAST_SCHEDULE_SEED=n plays one of them again.
  const char* only = std::getenv("BALLAST_SCHEDULE_SEED");
  Board board(ranks);
  run_ranks(
      ranks,
      [&](const World& world) {
        for (int seed = ranks - 1; seed < kSchedules; seed += 4) {
          if (only && std::atoi(only) != seed) continue;
          Player player(static_cast<std::uint64_t>(seed), world, board);
          SCOPED_TRACE(player.description());
          try {
            player.play();
          } catch (const std::exception& e) {
            ADD_FAILURE() << e.what();
            throw;
          }
        }
        if (!only) board.close(world);
      },
      thread_options());
  board.expect_equal();
}

TEST(Schedules, OneRank) { play_on(1); }
TEST(Schedules, TwoRanks) { play_on(2); }
TEST(Schedules, ThreeRanks) { play_on(3); }
TEST(Schedules, FourRanks) { play_on(4); }

}  // namespace
}  // namespace ballast::testing
