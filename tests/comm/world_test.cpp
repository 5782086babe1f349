#include "ballast/comm/world.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

using testing::run_ranks;
using testing::test_options;

/// What all ranks' `value` are, in rank order, by an all_gather on a communicator of its own.
std::vector<std::int64_t> gather(const World& world, std::int64_t value) {
  const at::Tensor out = at::empty({world.size()}, at::kLong);
  world.communicator("gather", at::kCPU)->all_gather(out, at::full({1}, value, at::kLong), "value").wait();
  return {out.const_data_ptr<std::int64_t>(), out.const_data_ptr<std::int64_t>() + out.numel()};
}

template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(World, SingleNeedsNoConnections) {
  const World world = World::single(test_options());
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_TRUE(world.device().is_cpu());
  EXPECT_EQ(world.timeout(), std::chrono::seconds(60));
  EXPECT_EQ(gather(world, 41), std::vector<std::int64_t>{41});
}

TEST(World, RanksKnowEachOther) {
  run_ranks(4, [](const World& world) {
    EXPECT_EQ(world.size(), 4);
    EXPECT_EQ(gather(world, world.rank() * 10), (std::vector<std::int64_t>{0, 10, 20, 30}));
    const World copy = world;
    EXPECT_EQ(gather(copy, copy.rank()), (std::vector<std::int64_t>{0, 1, 2, 3}));
  });
}

TEST(World, ARankThatLeavesAtOnceBreaksNoPeersConnection) {
  WorldOptions sockets = test_options();
  sockets.backend = "gloo";
  const auto connect_and_leave = [](const World& world) {
    for (int repeat = 0; repeat < 30; ++repeat) world.communicator("brief", at::kCPU);
  };
  EXPECT_NO_THROW(run_ranks(3, connect_and_leave, sockets));
}

TEST(World, SeveralOverOneStoreDoNotMix) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](const World& outer) {
    for (int repeat = 0; repeat < 3; ++repeat) {  // as an engine that is built, destroyed and built again
      const World first = World::from_store(store, outer.rank(), 3, test_options());
      const World reversed = World::from_store(store, 2 - outer.rank(), 3, test_options());
      EXPECT_EQ(gather(first, first.rank()), (std::vector<std::int64_t>{0, 1, 2}));
      EXPECT_EQ(gather(reversed, outer.rank()), (std::vector<std::int64_t>{2, 1, 0}));
    }
  });
}

TEST(World, TakesAProcessGroupsRanksAndStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(2, [&](const World& outer) {
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 1 - outer.rank(), 2);
    const World world = World::from_process_group(group, test_options());
    EXPECT_EQ(world.rank(), 1 - outer.rank());
    EXPECT_EQ(gather(world, outer.rank()), (std::vector<std::int64_t>{1, 0}));
  });
  EXPECT_NE(text_of<UseError>([] { World::from_process_group({}); }).find("no process group"), std::string::npos);
}

TEST(World, WrongOptionsAreRefusedWithTheirValues) {
  const auto refusal = [](const char* device, const char* backend) {
    WorldOptions options = test_options();
    options.device = device;
    options.backend = backend;
    return text_of<UseError>([&] { World::single(options); });
  };
  EXPECT_EQ(refusal("gpu", "auto"), "[comm.device] not a device (device = gpu; allowed: auto, cpu, cuda, cuda:N)");
  EXPECT_EQ(refusal("meta", "auto"),
            "[comm.device] no such kind of device (device = meta; allowed: auto, cpu, cuda, cuda:N)");
  EXPECT_NE(refusal("cuda:99", "auto").find("no such GPU (device = cuda:99"), std::string::npos);
  EXPECT_EQ(refusal("cpu", "mpi"), "[comm.backend] not a backend (backend = mpi; allowed: auto, gloo, nccl, threads)");
  EXPECT_EQ(refusal("cpu", "nccl"), "[comm.backend] nccl needs a CUDA device (backend = nccl, device cpu)");
  EXPECT_NE(text_of<UseError>([] { World::from_store({}, 0, 2); }).find("no store"), std::string::npos);
  EXPECT_NE(text_of<UseError>([] {
              World::from_store(c10::make_intrusive<c10d::HashStore>(), 2, 2, test_options());
            }).find("rank 2, size 2"),
            std::string::npos);
}

TEST(World, MissingRanksAreNamed) {
  WorldOptions options = test_options();
  options.timeout = std::chrono::milliseconds(300);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string text = text_of<CommError>([&] { World::from_store(store, 1, 3, options); });
  EXPECT_EQ(text.find("[comm.join] not all ranks came to the rendezvous (missing: 0 2; rank 1 of 3, timeout 300 ms"),
            0u)
      << text;
}

}  // namespace
}  // namespace ballast
