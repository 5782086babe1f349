#include "ballast/grads/window.h"

#include <gtest/gtest.h>

#include <limits>

#include "ballast/base/error.h"

namespace ballast {
namespace {

using Scaling = Window::Scaling;

TEST(Window, ManagedEndsAfterItsStepsAndCallerOwnedAlways) {
  Window managed(true, 3), caller_owned(false, 3);
  for (int k = 0; k < 3; ++k) {
    EXPECT_EQ(managed.boundary(), k == 2);
    EXPECT_TRUE(caller_owned.boundary());
    managed.begin_backward({}, true);
    managed.complete_micro_batch(true);
    EXPECT_EQ(managed.ended(), k == 2);
  }
  EXPECT_TRUE(caller_owned.ended());
}

TEST(Window, AStepWithoutABackwardCountsNothingAndEndsWhatIsPending) {
  Window window(true, 4);
  window.complete_micro_batch(false);
  EXPECT_FALSE(window.ended());
  window.begin_backward({}, true);
  window.begin_backward({}, true);  // one micro-batch all the same
  window.complete_micro_batch(true);
  EXPECT_EQ(window.micro_batches(), 1);
  EXPECT_FALSE(window.ended());
  window.set_boundary(true);
  window.complete_micro_batch(false);
  EXPECT_TRUE(window.ended());
  EXPECT_EQ(window.micro_batches(), 1);
  EXPECT_EQ(window.normaliser(Scaling::kMean, 2, 0), 2) << "the micro-batches that it really had";
}

TEST(Window, TheCallersBoundaryStaysUntilItIsGivenAnew) {
  Window window(true, 1);
  window.set_boundary(false);
  for (int k = 0; k < 3; ++k) {
    window.begin_backward({}, true);
    window.complete_micro_batch(true);
    EXPECT_FALSE(window.ended());
  }
  window.clear();
  EXPECT_FALSE(window.boundary());
  window.set_boundary(true);
  EXPECT_TRUE(window.boundary());
  EXPECT_THROW(Window(false, 1).set_boundary(true), UseError);
}

TEST(Window, OneWayToNormaliseAWindow) {
  struct Way {
    std::optional<double> weight;
    bool scale_wrt_gas;
    Scaling scaling;
    double normaliser;  // of two ranks, weights of 5 in all
  };
  const Way ways[] = {{{}, true, Scaling::kMean, 6}, {{}, false, Scaling::kSum, 2}, {2.5, true, Scaling::kWeighted, 5}};
  for (const Way& way : ways)
    for (const Way& other : ways) {
      Window window(false, 3);
      window.begin_backward(way.weight, way.scale_wrt_gas);
      EXPECT_EQ(window.scaling(), way.scaling);
      EXPECT_EQ(window.normaliser(window.scaling(), 2, 5), way.normaliser);
      if (&way == &other) continue;
      EXPECT_THROW(window.begin_backward(other.weight, other.scale_wrt_gas), UseError);
      EXPECT_EQ(window.backwards(), 1) << "a refused backward doesn't count";
      EXPECT_EQ(window.weight(), way.weight.value_or(0));
      window.clear();
      EXPECT_NO_THROW(window.begin_backward(other.weight, other.scale_wrt_gas));
    }
}

TEST(Window, RefusesWeightsThatAreNoWeights) {
  Window window(false, 1);
  for (double bad : {-1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THROW(window.begin_backward(bad, true), UseError) << bad;
  EXPECT_EQ(window.scaling(), Scaling::kUnset);
  EXPECT_NO_THROW(window.begin_backward(0.0, true));
}

TEST(Window, ClearStartsAnew) {
  Window window(true, 2);
  window.begin_backward(3.0, true);
  window.complete_micro_batch(true);
  window.mark_broken();
  window.clear();
  EXPECT_EQ(window.backwards() + window.micro_batches() + window.backwards_since_step(), 0);
  EXPECT_EQ(window.weight(), 0);
  EXPECT_EQ(window.scaling(), Scaling::kUnset);
  EXPECT_FALSE(window.broken());
  EXPECT_EQ(window.number(), 1);
}

}  // namespace
}  // namespace ballast
