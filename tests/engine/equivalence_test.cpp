// Every engine gives the parameters that one process of torch::optim gives on the whole batch: all stages, dtypes,
// windows, world sizes, overlap, clipping and placements, on a model with every awkward kind of parameter.

#include <gtest/gtest.h>

#include <tuple>

#include "ballast/comm/testing.h"
#include "tests/engine/support/homes.h"
#include "tests/engine/support/reference.h"
#include "tests/engine/support/trial.h"
#include "tests/engine/support/zoo.h"

namespace ballast::testing {
namespace {

constexpr int kSteps = 5;
constexpr double kLr = .05, kEps = .1, kDecay = .1, kClip = .15;
constexpr double kFp16Scale = 1024;

enum class Windows { kOne, kThree, kVarying };
const std::vector<Windows> kWindows{Windows::kOne, Windows::kThree, Windows::kVarying};

int length(Windows windows, int step) {
  constexpr int kLengths[kSteps] = {2, 1, 4, 1, 3};
  return windows == Windows::kOne ? 1 : windows == Windows::kThree ? 3 : kLengths[step];
}
/// Accumulation steps in the configuration. Varying windows give weights, so that it only says when a managed one ends.
int configured(Windows windows) { return windows == Windows::kVarying ? 2 : length(windows, 0); }
std::optional<double> weight(Windows windows, int step, int k, int rank) {
  if (windows != Windows::kVarying) return std::nullopt;
  return 1 << ((step + k + rank) % 3);  // a power of two: scaling a half-precision gradient by it is exact
}

/// All that changes the numbers.
struct Problem {
  DType dtype;
  Windows windows;
  int world;
  bool clip;
};
/// All that must not.
struct Manner {
  int stage = 0;
  Home home = homes().front();
  bool managed = true, overlap = true;
  std::int64_t bucket = 500'000'000;
};

std::string name_of(const Problem& problem, const Manner& manner) {
  std::ostringstream out;
  out << name_of(Cell{manner.stage, manner.home.placement, problem.dtype, manner.managed}) << ", " << manner.home.name
      << ", windows "
      << (problem.windows == Windows::kOne     ? "of 1"
          : problem.windows == Windows::kThree ? "of 3"
                                               : "varying")
      << ", world " << problem.world << (problem.clip ? ", clipped" : "") << (manner.overlap ? ", overlap" : "")
      << ", bucket " << manner.bucket;
  return out.str();
}

using Masters = std::map<std::string, at::Tensor>;
struct Outcome {
  Masters masters;
  std::vector<double> norms;
};

Outcome plain(const Problem& problem) {
  auto model = std::make_shared<Zoo>();
  // Where the engine computes: half precision rounds otherwise in another device's matrix products.
  const c10::Device device(test_options().device);
  model->to(device);
  Reference reference(model, scalar_of(problem.dtype), adamw(kLr, kEps, kDecay));
  const double scale = problem.dtype == DType::kFloat16 ? kFp16Scale : 1;
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    const int n = length(problem.windows, step);
    double divisor = 0;
    for (int k = 0; k < n; ++k)
      for (int rank = 0; rank < problem.world; ++rank) {
        const double w = weight(problem.windows, step, k, rank).value_or(1);
        reference.backward(model->loss(sample(step, k, rank, device)), w * scale);
        divisor += w;
      }
    outcome.norms.push_back(reference.step(divisor * scale, problem.clip ? kClip : 0));
  }
  for (const auto& [name, value] : reference.masters()) outcome.masters[name] = value.cpu();
  return outcome;
}

nlohmann::json settings_of(const Problem& problem, const Manner& manner) {
  const Cell cell{manner.stage, manner.home.placement, problem.dtype, manner.managed};
  nlohmann::json changes = Zoo::leaf_settings();
  changes.merge_patch(manner.home.changes());
  changes.merge_patch({{"zero_optimization",
                        {{"overlap_comm", manner.overlap},
                         {"reduce_bucket_size", manner.bucket},
                         {"allgather_bucket_size", manner.bucket},
                         {"stage3_prefetch_bucket_size", manner.overlap ? 50'000'000 : 0}}}});
  changes["gradient_clipping"] = problem.clip ? kClip : 0.0;
  changes["optimizer"] = {{"type", "AdamW"}, {"params", {{"lr", kLr}, {"eps", kEps}, {"weight_decay", kDecay}}}};
  return settings(cell, configured(problem.windows), changes);
}

Outcome engine_run(const Problem& problem, const Manner& manner, const World& world, Board& board) {
  auto model = std::make_shared<Zoo>();
  Session session(model, settings_of(problem, manner), world, board);
  Engine& engine = session.engine();
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    const int n = length(problem.windows, step);
    StepReport report;
    for (int k = 0; k < n; ++k) {
      engine.backward(model->loss(sample(step, k, world.rank(), world.device())),
                      {.weight = weight(problem.windows, step, k, world.rank())});
      if (!manner.managed && k + 1 < n) continue;
      if (manner.managed && problem.windows == Windows::kVarying) engine.set_gradient_accumulation_boundary(k + 1 == n);
      report = session.step();
    }
    EXPECT_TRUE(report.applied) << "step " << step;
    outcome.norms.push_back(report.grad_norm);
  }
  outcome.masters = session.masters();
  session.post_parameters();
  return outcome;
}

double tolerance(DType dtype) {
  // fp32: the order of additions and the optimizer's own last bits. Half precision: those move a weight's rounding to
  // the next value now and then, and with it a gradient by a part in 2^9 or 2^12.
  return dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kBFloat16 ? 2e-4 : 5e-5;
}

void expect_close(const Outcome& got, const Outcome& want, DType dtype) {
  for (const auto& [name, value] : want.masters) {
    const double off = value.numel() == 0 ? 0 : (got.masters.at(name).cpu() - value).abs().max().item<double>();
    EXPECT_LE(off, tolerance(dtype)) << name;
  }
  for (std::size_t i = 0; i < want.norms.size(); ++i) {
    const double relative = dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kBFloat16 ? 5e-3 : 1e-3;
    EXPECT_NEAR(got.norms[i], want.norms[i], relative * want.norms[i]) << "norm of step " << i;
  }
}

void expect_same_bits(const Outcome& a, const Outcome& b, const std::string& what) {
  EXPECT_EQ(a.norms, b.norms) << what;
  for (const auto& [name, value] : a.masters) EXPECT_TRUE(bit_equal(value, b.masters.at(name))) << name << ", " << what;
}

void grid(int world_size, DType dtype) {
  // The plain answers first: they are the same for all ranks.
  std::vector<std::pair<Problem, Outcome>> problems;
  for (Windows windows : kWindows)
    for (bool clip : {false, true}) {
      const Problem problem{dtype, windows, world_size, clip};
      problems.emplace_back(problem, plain(problem));
      if (clip) {
        EXPECT_GT(*std::max_element(problems.back().second.norms.begin(), problems.back().second.norms.end()), kClip)
            << "clipping is never tried";
      }
    }
  Board board(world_size);
  run_ranks(
      world_size,
      [&](const World& world) {
        for (const auto& [problem, answer] : problems) {
          // A CUDA device's updates are LibTorch's fused kernels, which round otherwise than the host's, and its sums
          // of squares, too: there only homes with the same kernels compare.
          std::map<std::string, Outcome> first, on_host;
          for (int stage : {0, 1, 2, 3})
            for (const Home& home : homes())
              for (bool overlap : {false, true}) {
                // To save time: where nothing but a home's storage is new, overlap and the kind of window take turns.
                const bool all_manners = home.zero.empty() && !Cell{stage, home.placement}.on_disk();
                if (!all_manners && overlap != (stage % 2 == 1)) continue;
                const Manner managed{stage, home, true, overlap}, caller_owned{stage, home, false, overlap};
                SCOPED_TRACE(name_of(problem, managed) + ", rank " + std::to_string(world.rank()));
                const Outcome a = engine_run(problem, all_manners || stage < 2 ? managed : caller_owned, world, board);
                expect_close(a, answer, dtype);
                if (all_manners)
                  expect_same_bits(a, engine_run(problem, caller_owned, world, board), "managed against caller-owned");
                const char* kernels = world.device().is_cpu()                ? "everywhere"
                                      : home.placement == Placement::kDevice ? "device"
                                      : home.sums_stay()                     ? "norm on the device"
                                      : home.on_device()                     ? "both"
                                                                             : "host";
                // One backward a window leaves no freedom in the order of additions, in no stage and no placement.
                const Outcome& reference = first.try_emplace(kernels, a).first->second;
                if (problem.windows == Windows::kOne) expect_same_bits(a, reference, "this cell against stage 0");
                // In no window it matters whether host memory or a disk keeps what a chunk's update changes.
                if (home.placement == Placement::kDevice) continue;
                const std::string host_twin = std::to_string(stage) + kernels + std::to_string(overlap);
                const Outcome& twin = on_host.try_emplace(host_twin, a).first->second;
                expect_same_bits(a, twin, "this cell against states on the host");
              }
        }
        board.close(world);
      },
      thread_options());
  board.expect_equal();
}

TEST(Equivalence, OneRankFp32) { grid(1, DType::kFloat32); }
TEST(Equivalence, OneRankBf16) { grid(1, DType::kBFloat16); }
TEST(Equivalence, OneRankFp16) { grid(1, DType::kFloat16); }
TEST(Equivalence, TwoRanksFp32) { grid(2, DType::kFloat32); }
TEST(Equivalence, TwoRanksBf16) { grid(2, DType::kBFloat16); }
TEST(Equivalence, TwoRanksFp16) { grid(2, DType::kFloat16); }
TEST(Equivalence, FourRanksFp32) { grid(4, DType::kFloat32); }
TEST(Equivalence, FourRanksBf16) { grid(4, DType::kBFloat16); }
TEST(Equivalence, FourRanksFp16) { grid(4, DType::kFloat16); }

TEST(Equivalence, OneBackwardAWindowIsBitEqualForEveryBucketSizeAndRun) {
  for (int world_size : {2, 3}) {
    Board board(world_size);
    run_ranks(
        world_size,
        [&](const World& world) {
          for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
            const Problem problem{dtype, Windows::kOne, world_size, true};
            const Outcome first = engine_run(problem, {}, world, board);
            for (int stage : {0, 1, 2, 3})
              for (std::int64_t bucket : {1, 100, 500'000'000})
                for (bool overlap : {false, true}) {
                  const Manner manner{stage, homes().front(), true, overlap, bucket};
                  SCOPED_TRACE(name_of(problem, manner) + ", rank " + std::to_string(world.rank()));
                  expect_same_bits(engine_run(problem, manner, world, board), first, "against stage 0");
                }
          }
          board.close(world);
        },
        thread_options());
    board.expect_equal();
  }
}

// The rest of this file's ranks are threads that share memory; here they speak through sockets, whose transfers really
// run beside the computation.
TEST(Equivalence, OverSockets) {
  WorldOptions sockets = test_options();
  sockets.backend = "gloo";
  for (int world_size : {2, 3}) {
    Board board(world_size);
    run_ranks(
        world_size,
        [&](const World& world) {
          const DType dtype = world_size == 2 ? DType::kFloat32 : DType::kBFloat16;
          const Problem problem{dtype, Windows::kThree, world_size, true};
          const Outcome answer = plain(problem);
          for (int stage : {0, 1, 2, 3}) {
            const Manner manner{stage, homes()[stage % 3], false, true, 100};
            SCOPED_TRACE(name_of(problem, manner) + ", rank " + std::to_string(world.rank()));
            expect_close(engine_run(problem, manner, world, board), answer, dtype);
          }
          board.close(world);
        },
        sockets);
    board.expect_equal();
  }
}

// Windows of several backwards: other stages may add in another order, but never another way in the next run.
TEST(Equivalence, TwoRunsAreBitEqual) {
  Board board(2);
  run_ranks(
      2,
      [&](const World& world) {
        for (int stage : {0, 1, 2, 3})
          for (const Home& home : homes()) {
            const Problem problem{DType::kBFloat16, Windows::kThree, 2, true};
            const Manner manner{stage, home, false, true, 100};
            SCOPED_TRACE(name_of(problem, manner) + ", rank " + std::to_string(world.rank()));
            expect_same_bits(engine_run(problem, manner, world, board), engine_run(problem, manner, world, board),
                             "two runs");
          }
        board.close(world);
      },
      thread_options());
  board.expect_equal();
}

}  // namespace
}  // namespace ballast::testing
