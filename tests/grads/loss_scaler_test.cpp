#include "ballast/grads/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "ballast/base/error.h"

namespace ballast {
namespace {

Fp16Config dynamic(int power, std::int64_t window, int hysteresis) {
  Fp16Config config;
  config.enabled = true;
  config.initial_scale_power = power;
  config.loss_scale_window = window;
  config.hysteresis = hysteresis;
  return config;
}

std::vector<double> scales_after(LossScaler scaler, const std::vector<int>& overflows) {
  std::vector<double> scales;
  for (const int overflow : overflows) {
    scaler.update(overflow != 0);
    scales.push_back(scaler.scale());
  }
  return scales;
}

// DeepSpeed#1599, #3008, #3553.
TEST(Case18, TheScaleAfterEachStep) {
  const std::vector<int> overflows{0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1};
  Fp16Config config = dynamic(10, 2, 2);
  EXPECT_EQ(LossScaler(config).scale(), 1024);
  EXPECT_EQ(scales_after(LossScaler(config), overflows),
            (std::vector<double>{1024, 1024, 2048, 2048, 1024, 1024, 512, 512, 512, 1024, 1024}));
  config.consecutive_hysteresis = true;
  EXPECT_EQ(scales_after(LossScaler(config), overflows),
            (std::vector<double>{1024, 1024, 2048, 2048, 1024, 1024, 1024, 1024, 1024, 2048, 2048}));
}

TEST(LossScaler, IsOneWithoutFp16AndFixedWhereItIsGiven) {
  LossScaler off{Fp16Config{}};
  Fp16Config fixed;
  fixed.enabled = true;
  fixed.loss_scale = 128;
  LossScaler constant(fixed);
  for (const bool overflow : {true, false, true, true, true, false}) {
    off.update(overflow);
    constant.update(overflow);
    EXPECT_EQ(off.scale(), 1);
    EXPECT_EQ(constant.scale(), 128);
  }
  constant.restore({.scale = 4});
  EXPECT_EQ(constant.scale(), 128);
}

TEST(LossScaler, OfHysteresisOneHalvesAtOnceAndGrowsEveryWindow) {
  EXPECT_EQ(scales_after(LossScaler(dynamic(4, 1, 1)), {1, 1, 0, 0, 0, 1}), (std::vector<double>{8, 4, 4, 8, 16, 8}));
}

TEST(LossScaler, FallsToItsLeastAndThenIsAnErrorThatLeavesItAsItWas) {
  Fp16Config config = dynamic(3, 1000, 2);
  config.min_loss_scale = 3;
  LossScaler scaler(config);
  for (const double want : {8.0, 4.0, 3.0}) {
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), want);
  }
  const LossScaler::State before = scaler.state();
  for (int again = 0; again < 2; ++again) {
    try {
      scaler.update(true);
      ADD_FAILURE() << "no error at the least scale";
    } catch (const UseError& error) {
      EXPECT_NE(std::string(error.what()).find("(scale 3, fp16.min_loss_scale = 3, step 3;"), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(scaler.state(), before);
  }
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 3);
}

TEST(LossScaler, StopsGrowingAtItsGreatest) {
  LossScaler scaler(dynamic(58, 1, 2));
  for (int step = 0; step < 8; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), LossScaler::kGreatest);
}

TEST(LossScaler, GoesOnFromASavedStateAsThoughNeverStopped) {
  const std::vector<int> overflows{0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1};
  for (std::size_t cut = 0; cut <= overflows.size(); ++cut) {
    LossScaler whole(dynamic(10, 2, 2)), resumed(dynamic(16, 2, 2));
    for (std::size_t i = 0; i < cut; ++i) whole.update(overflows[i] != 0);
    resumed.restore(whole.state());
    for (std::size_t i = cut; i < overflows.size(); ++i) {
      whole.update(overflows[i] != 0);
      resumed.update(overflows[i] != 0);
      EXPECT_EQ(resumed.scale(), whole.scale()) << "cut " << cut << ", step " << i;
    }
    EXPECT_EQ(resumed.state(), whole.state());
  }
}

TEST(LossScaler, RestoresWithinItsOwnBounds) {
  LossScaler scaler(dynamic(10, 2, 2));
  scaler.restore({.scale = 0.25, .steps = 7, .last_overflow = 3, .lives = 9});
  EXPECT_EQ(scaler.state(), (LossScaler::State{1, 7, 3, 2}));
  for (const double scale : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(scaler.restore({.scale = scale}), UseError) << scale;
  }
  EXPECT_EQ(scaler.scale(), 1);
}

}  // namespace
}  // namespace ballast
