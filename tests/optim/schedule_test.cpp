#include "ballast/optim/schedule.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

/// Two groups with rates 0.5 and 0.25.
OptimizerConfig two_groups() {
  OptimizerConfig optimizer;
  optimizer.hyper.lr = 0.5;
  optimizer.groups.push_back({{"bias"}, {.lr = 0.25}});
  return optimizer;
}

// Rates of the first applied steps, those that DeepSpeed's schedulers give an optimizer with the same two groups.
struct Row {
  const char* name;
  SchedulerConfig scheduler;
  std::vector<double> first;
  double second_over_first;  // ratio of the groups' rates
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class EachSchedule : public ::testing::TestWithParam<Row> {};

TEST_P(EachSchedule, HasDeepSpeedsRates) {
  const Row& row = GetParam();
  const Schedule schedule(row.scheduler, two_groups());
  for (std::size_t applied = 0; applied < row.first.size(); ++applied) {
    const std::vector<double> lr = schedule.lr(static_cast<std::int64_t>(applied));
    ASSERT_EQ(lr.size(), 2u);
    EXPECT_DOUBLE_EQ(lr[0], row.first[applied]) << row.name << ", " << applied << " steps applied";
    EXPECT_DOUBLE_EQ(lr[1], row.first[applied] * row.second_over_first) << row.name << ", " << applied;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Types, EachSchedule,
    ::testing::Values(
        Row{"none", {}, {0.5, 0.5, 0.5, 0.5}, 0.5},
        Row{"warm-up, log, given rates",
            {.type = SchedulerType::kWarmupLr, .warmup_min_lr = 0.1, .warmup_max_lr = 0.9, .warmup_num_steps = 4},
            {0.1, 0.1, 0.5, 0.7339850002884626, 0.9, 0.9, 0.9},
            1},
        Row{"warm-up, linear, the groups' own rates",
            {.type = SchedulerType::kWarmupLr, .warmup_num_steps = 4, .warmup_type = WarmupType::kLinear},
            {0, 0, 0.125, 0.25, 0.375, 0.5, 0.5},
            0.5},
        Row{"decay, linear",
            {.type = SchedulerType::kWarmupDecayLr,
             .warmup_min_lr = 0.01,
             .warmup_max_lr = 0.04,
             .warmup_num_steps = 3,
             .warmup_type = WarmupType::kLinear,
             .total_num_steps = 7},
            {0.01, 0.01, 0.019999999999999997, 0.03, 0.04, 0.0325, 0.025, 0.0175, 0.01, 0.01, 0.01},
            1},
        Row{"decay, a warm-up of one step counts two, and the greatest rate is 0.001",
            {.type = SchedulerType::kWarmupDecayLr, .warmup_num_steps = 1, .total_num_steps = 8},
            {0, 0, 0.001, 0.001, 0.0008333333333333334, 0.0006666666666666666, 0.0005, 0.0003333333333333333,
             0.00016666666666666666, 0, 0},
            1},
        Row{"decay that ends inside the warm-up",
            {.type = SchedulerType::kWarmupDecayLr,
             .warmup_max_lr = 1,
             .warmup_num_steps = 4,
             .warmup_type = WarmupType::kLinear,
             .total_num_steps = 2},
            {0, 0, 0.25, 0.5, 0.75, 0, 0},
            1},
        Row{"cosine, log",
            {.type = SchedulerType::kWarmupCosineLr,
             .warmup_num_steps = 3,
             .total_num_steps = 7,
             .warmup_min_ratio = 0.1,
             .cos_min_ratio = 0.05},
            {0, 0.05, 0.33391838910715577, 0.5, 0.43043786053180505, 0.2625, 0.09456213946819497, 0.025, 0.025},
            0.5},
        Row{"cosine, linear",
            {.type = SchedulerType::kWarmupCosineLr,
             .warmup_num_steps = 2,
             .warmup_type = WarmupType::kLinear,
             .total_num_steps = 6},
            {0, 0, 0.25, 0.4267840176271072, 0.250025, 0.0732659823728928, 5e-05, 5e-05},
            0.5},
        Row{"cosine that ends inside the warm-up",
            {.type = SchedulerType::kWarmupCosineLr,
             .warmup_num_steps = 4,
             .warmup_type = WarmupType::kLinear,
             .total_num_steps = 2},
            {0, 0, 0.125, 0.25, 0.375, 5e-05, 5e-05},
            0.5}));

// DeepSpeed#4344: the rate of the t-th applied step is 0.01 t, and steps that were skipped don't count.
TEST(Case19, ARateThatGrowsFromTheFirstAppliedStep) {
  const SchedulerConfig scheduler{.type = SchedulerType::kWarmupLr,
                                  .warmup_max_lr = 1,
                                  .warmup_num_steps = 100,
                                  .warmup_type = WarmupType::kLinear,
                                  .last_batch_iteration = 1};
  const Schedule schedule(scheduler, {});
  std::int64_t applied = 0;
  double p = 0;
  std::vector<double> values;
  for (const bool overflow : {true, true, false, false, false, false, false}) {
    const double lr = schedule.lr(applied).at(0);
    EXPECT_DOUBLE_EQ(lr, 0.01 * static_cast<double>(applied + 1));
    if (overflow) continue;
    ++applied;
    p -= lr * 0.5;  // Adam's first update of a constant gradient of 1 with eps 1
    values.push_back(p);
  }
  const std::vector<double> want{-0.005, -0.015, -0.03, -0.05, -0.075};
  ASSERT_EQ(values.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(values[i], want[i], 1e-12);
}

TEST(Schedule, HasNoStateButTheCount) {
  const SchedulerConfig scheduler{.type = SchedulerType::kWarmupCosineLr, .warmup_num_steps = 5, .total_num_steps = 50};
  const Schedule one(scheduler, two_groups()), resumed(scheduler, two_groups());
  for (std::int64_t applied = 0; applied < 60; ++applied) one.lr(applied);
  EXPECT_EQ(resumed.lr(17), one.lr(17));
}

TEST(Schedule, StartsWhereItIsTold) {
  SchedulerConfig scheduler{.type = SchedulerType::kWarmupLr, .warmup_num_steps = 10};
  const Schedule from_start(scheduler, two_groups());
  scheduler.last_batch_iteration = 3;
  EXPECT_EQ(Schedule(scheduler, two_groups()).lr(2), from_start.lr(6));
}

}  // namespace
}  // namespace ballast
