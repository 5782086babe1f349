#include "ballast/layout/layout.h"

#include <gtest/gtest.h>

#include "ballast/base/error.h"

namespace ballast {
namespace {

ParameterInfo parameter(std::string name, std::int64_t numel, std::string unit, bool trainable = true) {
  ParameterInfo info;
  info.names = {std::move(name)};
  info.shape = {numel};
  info.numel = numel;
  info.unit = std::move(unit);
  info.trainable = trainable;
  return info;
}

TEST(Layout, UnitsSplitByTrainabilityAndKeepOrderOfAppearance) {
  const Layout layout = make_layout({parameter("a.w", 7, "a"), parameter("b.w", 100, "b"),
                                     parameter("a.frozen", 3, "a", false), parameter("a.b", 33, "a")},
                                    3);
  ASSERT_EQ(layout.units.size(), 3U);
  EXPECT_EQ(layout.units[0].name, "a");
  EXPECT_EQ(layout.units[1].name, "b");
  EXPECT_FALSE(layout.units[2].trainable);
  ASSERT_EQ(layout.units[0].slots.size(), 2U);
  EXPECT_EQ(layout.units[0].slots[1].offset, kSlotAlign);
  EXPECT_EQ(layout.units[0].numel, 40);
  EXPECT_EQ(layout.unit_of(3).id, 0);
  EXPECT_EQ(layout.slot_of(3).numel, 33);
}

TEST(Layout, ShardsCoverTheUnitAndAreEquallyLong) {
  for (int world : {1, 2, 3, 4, 7})
    for (std::int64_t numel : {0, 1, 63, 64, 65, 1000}) {
      const Unit unit = make_layout({parameter("p", numel, "")}, world).units.at(0);
      EXPECT_EQ(unit.padded, unit.shard * world);
      EXPECT_GE(unit.padded, numel);
      EXPECT_EQ(unit.shard % kShardAlign, 0);
      EXPECT_EQ(unit.shard_of(world - 1).end, unit.padded);
    }
}

TEST(Layout, UnknownNameSuggestsTheNearest) {
  const Layout layout = make_layout({parameter("head.weight", 1, ""), parameter("head.bias", 1, "")}, 1);
  EXPECT_EQ(layout.find("head.bias"), 1);
  try {
    layout.find("head.wieght");
    FAIL();
  } catch (const UseError& e) {
    EXPECT_NE(std::string(e.what()).find("nearest: head.weight"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace ballast
