// The lane on which a rank works beside the computation: order, waiting, and what a failed job ends.
#include "ballast/tiers/host_lane.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ballast::tiers {
namespace {

TEST(HostLane, RunsJobsInTheOrderOfTheirSubmissionOnOneThread) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  {
    HostLane lane(c10::kCPU, 1);
    for (int i = 0; i < 100; ++i)
      lane.submit([&, i] {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
      });
  }  // its end runs what is queued
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(threads[static_cast<std::size_t>(i)], threads[0]);
    EXPECT_NE(threads[static_cast<std::size_t>(i)], std::this_thread::get_id());
  }
}

TEST(HostLane, WaitEndsWithItsJobWhileLaterOnesAreHeldUp) {
  HostLane lane(c10::kCPU, 1);
  std::promise<void> gate;
  int done = 0;
  const auto first = lane.submit([&] { done = 1; });
  lane.submit([&, open = gate.get_future().share()] {
    open.wait();
    done = 2;
  });
  lane.wait(first);
  EXPECT_EQ(done, 1);
  lane.wait(first);  // again, at once
  lane.wait(0);      // no job
  gate.set_value();
  lane.drain();
  EXPECT_EQ(done, 2);
}

TEST(HostLane, AJobsCapturesAreGoneWhenItsWaitReturns) {
  HostLane lane(c10::kCPU, 1);
  auto held = std::make_shared<int>(1);
  const auto ticket = lane.submit([held] {});
  lane.wait(ticket);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(HostLane, AFailedJobEndsItForEverybody) {
  HostLane lane(c10::kCPU, 1);
  std::promise<void> gate;
  bool ran = false;
  const auto fine = lane.submit([] {});
  lane.submit([open = gate.get_future().share()] {
    open.wait();
    throw std::runtime_error("the disk is gone");
  });
  const auto behind = lane.submit([&] { ran = true; });
  lane.wait(fine);
  lane.rethrow_failure();  // none yet
  gate.set_value();
  EXPECT_THROW(lane.wait(behind), std::runtime_error);
  EXPECT_THROW(lane.wait(fine), std::runtime_error) << "also for what had run: the caller must hear of it";
  EXPECT_THROW(lane.submit([] {}), std::runtime_error);
  EXPECT_THROW(lane.run([] {}), std::runtime_error);
  EXPECT_THROW(lane.drain(), std::runtime_error);
  EXPECT_THROW(lane.rethrow_failure(), std::runtime_error);
  EXPECT_FALSE(ran);
}

TEST(HostLane, JobsRecordNoGraph) {
  HostLane lane(c10::kCPU, 1);
  bool enabled = true;
  lane.run([&] { enabled = at::GradMode::is_enabled(); });
  EXPECT_FALSE(enabled);
  EXPECT_TRUE(at::GradMode::is_enabled()) << "here";
}

}  // namespace
}  // namespace ballast::tiers
