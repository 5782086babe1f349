#include "ballast/params/fault_order.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(FaultOrder, TellsForwardFromBackwardOnTheSecondPass) {
  FaultOrder order;
  const int pass[] = {0, 1, 2, 3, 2, 1, 0};
  for (int unit : pass) {
    EXPECT_EQ(order.predict(order.now()), -1) << "nothing is known before unit " << unit << " of the first pass";
    order.record(unit);
  }
  order.record(0);
  order.record(1);
  EXPECT_EQ(order.predict(order.now()), 2) << "forward";
  for (int unit : {2, 3, 2}) order.record(unit);
  EXPECT_EQ(order.predict(order.now()), 1) << "backward";
}

TEST(FaultOrder, FollowsAChangedOrderFromTheNextTimeOn) {
  FaultOrder order;
  for (int unit : {0, 1, 2, 0, 1, 3}) order.record(unit);
  for (int unit : {0, 1}) order.record(unit);
  EXPECT_EQ(order.predict(order.now()), 3);
}

}  // namespace
}  // namespace ballast
