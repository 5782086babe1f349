#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/comm/communicator.h"
#include "ballast/comm/testing.h"

namespace ballast {
namespace {

using testing::run_ranks;
using testing::test_options;

WorldOptions short_timeout(int milliseconds) {
  WorldOptions options = test_options();
  options.timeout = std::chrono::milliseconds(milliseconds);
  return options;
}

/// The CommError's text, "" where none was thrown.
std::string comm_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

void expect_contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Blocks ranks that must stay alive until the others have seen what they came to see.
class Latch {
 public:
  void open() { open_ = true; }
  void wait() const {
    while (!open_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

 private:
  std::atomic<bool> open_ = false;
};

/// A communicator over which all ranks have met: none of them is still busy connecting.
std::shared_ptr<Communicator> connected(const World& world) {
  auto comm = world.communicator("gather", at::kCPU);
  comm->all_gather(at::zeros({world.size()}), at::zeros({1}), "meeting").wait();
  return comm;
}

TEST(Failure, APeerThatDiesIsNoticedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  run_ranks(3, [](const World& world) {
    const auto comm = world.communicator("gather", at::kCPU);
    comm->all_gather(at::zeros({3}), at::zeros({1}), "unit first").wait();
    if (world.rank() == 1) return;  // its connections close
    const std::string text =
        comm_error([&] { comm->all_gather(at::zeros({3000}), at::zeros({1000}), "unit blocks.3").wait(); });
    expect_contains(
        text, {"[comm.all_gather] unit blocks.3 failed: ", "peer rank ", "of 3", "communicator gather", "collective 2",
               "#1 all_gather unit first 12 B done", "#2 all_gather unit blocks.3 11.7 KiB failed"});
  });
  EXPECT_LT(seconds_since(start), 30);  // half of the timeout: the closed connection was seen, not the clock
}

TEST(Failure, SendingToADeadPeerIsAnErrorAndNoSignal) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    Latch gone;
    run_ranks(2, [&](const World& world) {
      auto comm = connected(world);
      if (world.rank() == 1) {
        comm.reset();
        return gone.open();
      }
      gone.wait();
      for (int i = 0; i < 3; ++i) {  // before and after this rank has noticed
        EXPECT_NE(comm_error([&] { comm->all_gather(at::zeros({2}), at::zeros({1}), "unit a").wait(); }), "");
      }
    });
  }
}

// The first rank to miss a dead one ends too, and then those that miss that one: they still learn who began.
TEST(Failure, OfOneRankIsNamedThroughTheFailureOfAnother) {
  Latch dead, second_ended;
  run_ranks(3, [&](const World& world) {
    auto comm = connected(world);
    const auto gather = [&] { comm->all_gather(at::zeros({3}), at::zeros({1}), "unit a").wait(); };
    if (world.rank() == 1) {
      comm.reset();
      dead.open();
    } else if (world.rank() == 2) {
      dead.wait();
      expect_contains(comm_error(gather), {"peer rank 1: "});
      comm.reset();
      second_ended.open();
    } else {
      second_ended.wait();
      expect_contains(comm_error(gather), {"peer rank 1: ", "peer rank 2: "});
    }
  });
}

TEST(Failure, APeerThatHangsIsNoticedByTheTimeoutAndNamed) {
  Latch seen;
  run_ranks(
      2,
      [&](const World& world) {
        const auto comm = world.communicator("reduce", at::kCPU);
        if (world.rank() == 0) return seen.wait();
        const std::string text =
            comm_error([&] { comm->all_to_all(at::zeros({8}), at::ones({8}), "unit head").wait(); });
        expect_contains(text, {"[comm.all_to_all] unit head failed: peer rank 0", "rank 1 of 2"});
        seen.open();
      },
      short_timeout(1000));
}

TEST(Failure, LaterCollectivesRepeatTheCauseWithoutWaiting) {
  Latch seen;
  run_ranks(
      2,
      [&](const World& world) {
        const auto comm = world.communicator("gather", at::kCPU);
        if (world.rank() == 0) return seen.wait();
        // Three in flight, each of which could wait for a whole timeout.
        std::vector<PendingCollective> pending;
        for (int i = 0; i < 3; ++i) pending.push_back(comm->all_gather(at::zeros({2}), at::zeros({1}), "unit a"));
        EXPECT_NE(comm_error([&] { pending[0].wait(); }), "");
        const auto failed = std::chrono::steady_clock::now();
        EXPECT_NE(comm_error([&] { pending[1].wait(); }), "");
        pending.clear();  // the third is dropped unwaited
        const std::string text = comm_error([&] { comm->broadcast(at::zeros({4}), 0, "unit b"); });
        expect_contains(text, {"[comm.broadcast] unit b refused", "unit a failed: peer rank 0", "rank 1 of 2"});
        EXPECT_LT(seconds_since(failed), 2);
        seen.open();
      },
      short_timeout(2000));
}

TEST(Failure, ARankThatNeverComesToTheRendezvousIsNamed) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(comm_error([] {
              run_ranks(
                  3,
                  [](const World& world) {
                    if (world.rank() == 2) return;
                    const std::string text = comm_error([&] { world.communicator("gather", at::kCPU); });
                    expect_contains(text, {"[comm.communicator] can't connect the ranks", "communicator gather"});
                    throw CommError("test", text);
                  },
                  short_timeout(1000));
            }),
            "");
  EXPECT_LT(seconds_since(start), 30);
}

TEST(Failure, OfOneCommunicatorLeavesTheOthersUsable) {
  Latch seen;
  run_ranks(
      2,
      [&](const World& world) {
        const auto broken = world.communicator("broken", at::kCPU), sound = world.communicator("sound", at::kCPU);
        if (world.rank() == 1) {
          EXPECT_NE(comm_error([&] { broken->all_gather(at::zeros({2}), at::zeros({1}), "a").wait(); }), "");
          seen.open();
        }
        seen.wait();
        const at::Tensor out = at::zeros({2});
        sound->all_gather(out, at::full({1}, world.rank() + 1.0), "b").wait();
        EXPECT_TRUE(at::equal(out, at::tensor({1.0f, 2.0f})));
      },
      short_timeout(1000));
}

}  // namespace
}  // namespace ballast
