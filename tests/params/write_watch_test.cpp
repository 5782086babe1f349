#include "ballast/params/write_watch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace ballast {
namespace {

using Slots = std::vector<std::vector<at::Tensor>>;

TEST(WriteWatch, NamesTheFirstSlotThatWasWritten) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) tensors.push_back(at::zeros({2}));
  WriteWatch watch(Slots{{tensors[0]}, {tensors[1]}, {tensors[2]}});
  EXPECT_FALSE(watch.find());
  (void)tensors[1].sum();
  EXPECT_FALSE(watch.find());
  tensors[2].add_(1);
  EXPECT_EQ(watch.find(), std::size_t{2});
  tensors[1].view({1, 2}).add_(1);  // views share the counter
  EXPECT_EQ(watch.find(), std::size_t{1});
  watch.accept(1);
  EXPECT_EQ(watch.find(), std::size_t{2});
  watch.accept_all();
  EXPECT_FALSE(watch.find());
}

TEST(WriteWatch, SeesWritesThroughEveryTensorOfASlot) {
  const at::Tensor first = at::zeros({2}), second = first.variable_data();  // one memory, two counters
  WriteWatch watch(Slots{{first, second}});
  second.add_(1);
  EXPECT_EQ(watch.find(), std::size_t{0});
  watch.accept(0);
  first.add_(1);
  EXPECT_EQ(watch.find(), std::size_t{0});
}

TEST(WriteWatch, TakesTheWordOfWhoSawAWritePastTheCounter) {
  const at::Tensor tensor = at::zeros({2});
  WriteWatch watch(Slots{{tensor}});
  tensor.variable_data().fill_(1);
  EXPECT_FALSE(watch.find());
  watch.mark(0);
  EXPECT_EQ(watch.find(), std::size_t{0});
  watch.accept(0);
  EXPECT_FALSE(watch.find());
}

TEST(WriteWatch, OfNothingFindsNothing) {
  WriteWatch watch;
  EXPECT_FALSE(watch.find());
  watch.mark(0);
  EXPECT_FALSE(watch.find());
}

}  // namespace
}  // namespace ballast
