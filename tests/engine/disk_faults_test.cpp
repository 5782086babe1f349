// States on a disk that misbehaves: what the system may do is made good without a trace in the result; what
// it may not ends every rank with an error that names file, operation and rank, before any wrong value counts.
#include <malloc.h>
#include <sys/prctl.h>
#include <torch/torch.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <fstream>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "tests/data/temporary_folder.h"
#include "tests/engine/support/cases.h"
#include "tests/engine/support/rank_with_faulty_disk.h"
#include "tests/engine/support/swap_folder.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

using tiers::DiskOp;
using tiers::DiskRequest;
using tiers::Fault;

/// A swap file, and where it is in use.
struct File {
  const char* name;
  Placement placement;
  std::vector<int> stages;
};
const std::vector<File> kFiles{{"optimizer", Placement::kNvme, {0, 1, 2, 3}},
                               {"gradients", Placement::kAllNvme, {0, 1, 2, 3}},
                               {"parameters", Placement::kAllNvme, {3}}};

struct Training {
  std::map<std::string, at::Tensor> masters;
  int applied = 0;
  std::string error;  // what ended it
};

Training train(const World& world, const File& file, int stage, int steps) {
  Board unused(world.size());
  auto model = std::make_shared<Zoo>();
  nlohmann::json changes = Zoo::leaf_settings();
  changes["comm_timeout_seconds"] = 5;
  Session session(model, settings({stage, file.placement, DType::kFloat32, false}, 1, changes), world, unused);
  Engine& engine = session.engine();
  Training run;
  try {
    for (int step = 0; step < steps; ++step) {
      engine.backward(model->loss(sample(step, 0, world.rank(), world.device())));
      run.applied += engine.step().applied ? 1 : 0;
    }
    engine.synchronize();
    run.masters = session.masters();
  } catch (const Error& e) {
    run.error = e.what();
    try {  // by the engine, or by an operator on what has lost its values
      engine.backward(model->loss(sample(9, 0, world.rank(), world.device())));
      ADD_FAILURE() << "training went on after " << run.error;
    } catch (const std::exception& later) {
      EXPECT_EQ(std::string(later.what()).find("without an operator"), std::string::npos) << later.what();
    }
    EXPECT_THROW(engine.step(), std::exception);
    EXPECT_THROW(engine.zero_grad(), std::exception);
  } catch (const std::exception& e) {  // an operator that met the unit whose update had failed
    run.error = e.what();
    EXPECT_EQ(run.error.find("without an operator"), std::string::npos) << run.error;
    if (world.rank() == 0) {
      EXPECT_THROW(engine.step(), IoError);
    } else {
      EXPECT_THROW(engine.step(), CommError);
    }
  }
  return run;
}

class DiskFaults : public ::testing::TestWithParam<File> {};

TEST_P(DiskFaults, ShortTransfersInterruptionsAndSlownessLeaveNoTrace) {
  const File& file = GetParam();
  for (int stage : file.stages) {
    std::atomic<int> requests{0};
    const RankWithFaultyDisk faulty(0, std::string(file.name) + ".swap", [&](const DiskRequest& request) {
      switch (requests++ % 5) {
        case 1:
          return Fault::moves_only(request.bytes / 2);
        case 2:
          return Fault::error(EINTR);
        case 3:
          return Fault::takes(std::chrono::milliseconds(1));
        default:
          return Fault::none();
      }
    });
    run_ranks(
        2,
        [&](const World& world) {
          const Training run = train(world, file, stage, 6);
          EXPECT_EQ(run.error, "");
          Board unused(world.size());
          auto model = std::make_shared<Zoo>();
          Session session(model, settings({stage, Placement::kHost, DType::kFloat32, false}, 1, Zoo::leaf_settings()),
                          world, unused);
          for (int step = 0; step < 6; ++step) {
            session.engine().backward(model->loss(sample(step, 0, world.rank(), world.device())));
            session.engine().step();
          }
          for (const auto& [name, value] : session.masters())
            EXPECT_TRUE(bit_equal(value, run.masters.at(name))) << name << ", stage " << stage;
        },
        thread_options());
    EXPECT_GT(requests, 50);
  }
}

struct Breakdown {
  const char* name;
  DiskOp op;
  Fault fault;
  const char* told;  // in the error's text
};
class BreakingDisk : public ::testing::TestWithParam<std::tuple<File, Breakdown>> {};

TEST_P(BreakingDisk, EveryRankEndsAndNothingCountsAfterwards) {
  const auto& [file, breakdown] = GetParam();
  constexpr int kSteps = 12, kGood = 30;  // requests before the fault: some steps of every stage
  for (int stage : file.stages) {
    std::atomic<int> requests{0};
    const std::string name = std::string(file.name) + ".swap";
    const RankWithFaultyDisk faulty(0, name,
                                    [&, op = breakdown.op, fault = breakdown.fault](const DiskRequest& request) {
                                      return request.op == op && ++requests > kGood ? fault : Fault::none();
                                    });
    std::array<Training, 2> runs;
    run_ranks(
        2,
        [&, where = file](const World& world) {
          runs[static_cast<std::size_t>(world.rank())] = train(world, where, stage, kSteps);
        },
        thread_options());
    EXPECT_GT(requests, kGood) << "the fault never came";
    for (const Training& run : runs) {
      EXPECT_NE(run.error, "") << "stage " << stage;
      EXPECT_LT(run.applied, kSteps);
    }
    for (const std::string& part : {std::string(breakdown.told), name, std::string("rank 0")})
      EXPECT_NE(runs[0].error.find(part), std::string::npos) << part << " in: " << runs[0].error;
  }
  expect_nothing_swapped();
}

std::string file_name(const ::testing::TestParamInfo<File>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Files, DiskFaults, ::testing::ValuesIn(kFiles), file_name);
INSTANTIATE_TEST_SUITE_P(
    Files, BreakingDisk,
    ::testing::Combine(::testing::ValuesIn(kFiles),
                       ::testing::Values(Breakdown{"ReadError", DiskOp::kRead, Fault::error(EIO), "Input/output error"},
                                         Breakdown{"WriteError", DiskOp::kWrite, Fault::error(EIO),
                                                   "Input/output error"},
                                         Breakdown{"DiskFull", DiskOp::kWrite, Fault::error(ENOSPC), "No space left"},
                                         Breakdown{"Truncated", DiskOp::kRead, Fault::moves_only(0), "moves nothing"},
                                         Breakdown{"FlippedBit", DiskOp::kRead, Fault::flips(12345), "checksum"})),
    [](const auto& info) { return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name; });

// Ranks read their parts of a pending window together: one that can't read its own must not leave the others waiting.
TEST(DiskBreaks, ASaveWhoseWindowCannotBeReadTellsEveryRankWhy) {
  for (const int stage : {2, 3}) {  // sums land on disk before the window ends
    std::atomic<bool> broken{false};
    const RankWithFaultyDisk faulty(1, "gradients.swap", [&](const DiskRequest& request) {
      return broken && request.op == DiskOp::kRead ? Fault::error(EIO) : Fault::none();
    });
    const data::TemporaryFolder folder;
    run_ranks(
        2,
        [&](const World& world) {
          Board unused(world.size());
          auto model = std::make_shared<Zoo>();
          nlohmann::json changes = Zoo::leaf_settings();
          changes["comm_timeout_seconds"] = 30;
          Session session(model, settings({stage, Placement::kAllNvme, DType::kFloat32, false}, 1, changes), world,
                          unused);
          session.engine().backward(model->loss(sample(0, 0, world.rank(), world.device())));
          session.engine().full_grad("gain");  // all that is to land has landed
          broken = true;
          try {
            SaveOptions options;
            options.include_window = true;
            session.engine().save_checkpoint(folder.path(), "t", options);
            ADD_FAILURE() << "saved, stage " << stage;
          } catch (const IoError& e) {
            EXPECT_NE(std::string(e.what()).find("gradients.swap"), std::string::npos) << e.what();
          }
        },
        thread_options());
  }
}

// After an error that ended the engine a forward must not wait for peers that may be gone.
TEST(DiskBreaks, AForwardAfterTheEndOfTheEngineThrowsItsCause) {
  std::atomic<bool> broken{false};
  const RankWithFaultyDisk faulty(0, "optimizer.swap", [&](const DiskRequest& request) {
    return broken && request.op == DiskOp::kRead ? Fault::error(EIO) : Fault::none();
  });
  run_ranks(
      2,
      [&](const World& world) {
        Board unused(world.size());
        auto model = std::make_shared<Zoo>();
        nlohmann::json changes = Zoo::leaf_settings();
        changes["comm_timeout_seconds"] = 5;
        Session session(model, settings({3, Placement::kNvme, DType::kFloat32, false}, 1, changes), world, unused);
        Engine& engine = session.engine();
        engine.backward(model->loss(sample(0, 0, world.rank(), world.device())));
        engine.step();
        engine.synchronize();
        engine.full_parameter("unused.weight");
        broken = true;
        EXPECT_ANY_THROW({
          for (const auto& item : model->named_parameters()) engine.full_parameter(item.key());
        });
        if (world.rank() != 0) return;
        try {
          model->loss(sample(1, 0, world.rank(), world.device()));
          ADD_FAILURE() << "forward went on";
        } catch (const std::exception& e) {
          EXPECT_NE(std::string(e.what()).find("optimizer.swap"), std::string::npos) << e.what();
        }
      },
      thread_options());
}

// What a month-long run can't afford to gain a little of at each step.
struct Usage {
  std::int64_t descriptors = 0, threads = 0;
  std::int64_t resident = 0;   // KiB; without the pages of program files, which the kernel maps and drops as it likes
  std::int64_t allocated = 0;  // bytes that malloc has given out

  // Memory that was freed but that malloc keeps for its arenas, which depends on how threads happened to meet in it, is
  // given back first: what then remains resident is held by somebody.
  static Usage now() {
    Usage usage;
    malloc_trim(0);
    const struct mallinfo2 heap = mallinfo2();
    usage.allocated = static_cast<std::int64_t>(heap.uordblks + heap.hblkhd);
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++usage.descriptors;
    for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(thread.path() / "comm"), name);
      // io_uring's workers are the kernel's, which has some where a file system can't do without (as tmpfs).
      if (!name.starts_with("iou-")) ++usage.threads;
    }
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("RssAnon:")) usage.resident += std::stoll(line.substr(8));
      if (line.starts_with("RssShmem:")) usage.resident += std::stoll(line.substr(9));
    }
    return usage;
  }
};

// The kernel's khugepaged makes a whole huge page (2 MiB) resident where a host arena has used a few small ones,
// whenever it comes by: small pages only, so that what is resident is what was touched.
class SmallPages {
 public:
  SmallPages() { ::prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); }
  ~SmallPages() { ::prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0); }
  SmallPages(const SmallPages&) = delete;
  SmallPages& operator=(const SmallPages&) = delete;
};

// DeepSpeed#8075, #5700, #6630.
TEST(Case37, FiveHundredStepsWithStatesOnDiskKeepDescriptorsThreadsAndMemory) {
  const SmallPages small_pages;
  for (const Cell& cell : {Cell{2, Placement::kNvme}, Cell{3, Placement::kAllNvme}})
    run_ranks(
        1,
        [&](const World& world) {
          Board unused(world.size());
          auto model = std::make_shared<Zoo>();
          Session session(model, settings(cell, 1, Zoo::leaf_settings()), world, unused);
          Usage early;
          for (int step = 0; step < 500; ++step) {
            session.engine().backward(model->loss(sample(step, 0, world.rank(), world.device())));
            EXPECT_TRUE(session.engine().step().applied);  // Session::step() would keep every report
            if (step == 20) early = Usage::now();
          }
          const Usage late = Usage::now();
          EXPECT_EQ(late.descriptors, early.descriptors);
          EXPECT_EQ(late.threads, early.threads);
// AddressSanitizer keeps what is freed for a while, ThreadSanitizer a history of each thread's accesses.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
          EXPECT_GT(early.resident, 0);
          EXPECT_LE(late.resident, early.resident * 101 / 100);
          EXPECT_LT(late.allocated - early.allocated, 64 * 1024);
#endif
        },
        thread_options());
}

}  // namespace
}  // namespace ballast::testing
