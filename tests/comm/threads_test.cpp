// Ranks that are threads and reach each other through memory: what other tests build on.
#include "ballast/comm/threads.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "ballast/base/error.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/testing.h"

namespace ballast::testing {
namespace {

TEST(Threads, CollectivesMoveWhatGlooMoves) {
  for (int ranks : {2, 3, 4})
    run_ranks(
        ranks,
        [](const World& world) {
          const auto comm = world.communicator("test", at::kCPU);
          const int size = world.size(), rank = world.rank();
          for (std::int64_t n : {1, 7, 1000}) {
            const at::Tensor mine = at::arange(size * n, at::kFloat) + 10'000 * rank;
            const at::Tensor gathered = at::empty({size * size * n}, at::kFloat), crossed = at::empty_like(mine);
            PendingCollective first = comm->all_gather(gathered, mine, "gather");
            PendingCollective second = comm->all_to_all(crossed, mine, "cross");
            const at::Tensor sent = mine.clone();
            second.wait();
            first.wait();
            mine.zero_();  // allowed now, whatever the peers still do
            for (int peer = 0; peer < size; ++peer) {
              const at::Tensor theirs = sent + 10'000 * (peer - rank);
              EXPECT_TRUE(at::equal(gathered.narrow(0, peer * size * n, size * n), theirs));
              EXPECT_TRUE(at::equal(crossed.narrow(0, peer * n, n), theirs.narrow(0, rank * n, n)));
            }
            for (int root = 0; root < size; ++root) {
              const at::Tensor data = at::full({n}, rank, at::kLong);
              comm->broadcast(data, root, "broadcast").wait();
              EXPECT_TRUE(at::equal(data, at::full({n}, root, at::kLong)));
            }
          }
        },
        thread_options());
}

TEST(Threads, APeerThatLeavesOrIsLateIsAnErrorThatNamesIt) {
  const auto gather = [](const World& world, Communicator& comm) {
    const at::Tensor out = at::empty({world.size()}, at::kFloat), in = at::zeros({1}, at::kFloat);
    try {
      comm.all_gather(out, in, "unit blocks.3").wait();
      return std::string("no error");
    } catch (const CommError& e) {
      return std::string(e.what());
    }
  };
  for (const bool leaves : {true, false}) {
    WorldOptions options = thread_options();
    options.timeout = std::chrono::milliseconds(leaves ? 60'000 : 200);
    run_ranks(
        2,
        [&](const World& world) {
          auto comm = world.communicator("test", at::kCPU);
          if (world.rank() == 1) {
            if (!leaves) std::this_thread::sleep_for(std::chrono::milliseconds(1000));
            return;
          }
          const std::string text = gather(world, *comm);
          for (const char* part : {"unit blocks.3", "peer rank 1", leaves ? "left" : "timed out"})
            EXPECT_NE(text.find(part), std::string::npos) << text;
        },
        options);
  }
}

TEST(Threads, NeedOneProcess) {
  WorldOptions options = thread_options();
  options.backend = "threads";
  EXPECT_EQ(World::single(options).size(), 1);
  EXPECT_THROW(World::from_store({}, 0, 2, options), UseError);
}

}  // namespace
}  // namespace ballast::testing
