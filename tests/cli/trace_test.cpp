// What --trace is asked for and what a run's trace shows: which lanes, and what lies under what.
#include "cli/trace.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "ballast/base/error.h"
#include "ballast/comm/testing.h"
#include "ballast/tiers/testing.h"
#include "cli/trainer.h"
#include "tests/cli/trace_reader.h"
#include "tests/data/temporary_folder.h"

namespace ballast::cli {
namespace {

TEST(TraceOptions, StepsAreTwoNumbers) {
  const StepRange steps = parse_steps("3:12");
  EXPECT_EQ(steps.first, 3);
  EXPECT_EQ(steps.last, 12);
  for (const char* wrong : {"", "3", "3:", ":3", "5:4", "0:4", "3-4", "3:4:5", "a:b", "3:4 "})
    EXPECT_THROW(parse_steps(wrong), UseError) << wrong;
}

TEST(TraceOptions, EachRankHasAFileOfItsOwn) {
  EXPECT_EQ(trace_file("out/a.json", 0, 1), "out/a.json");
  EXPECT_EQ(trace_file("out/a.json", 3, 4), "out/a.rank3.json");
  EXPECT_EQ(trace_file("out.d/trace", 1, 2), "out.d/trace.rank1");
}

TEST(TraceOptions, WhatIsWrongIsSaidBeforeTheRun) {
  const data::TemporaryFolder folder;
  EXPECT_THROW(RunTrace({(folder.path() / "t.json").string(), StepRange{5, 9}}, /*run_steps=*/4, 0, 1), UseError);
  EXPECT_THROW(RunTrace({(folder.path() / "absent/t.json").string(), {}}, 4, 0, 1), IoError);
  RunTrace none({}, 4, 0, 1);
  none.begin(1);
  none.end(1, true);
  EXPECT_TRUE(none.written().empty());
}

/// A disk that takes its time, so that updates are slow and forwards are not.
class SlowDisk final : public tiers::DiskQueue {
 public:
  explicit SlowDisk(std::unique_ptr<tiers::DiskQueue> queue) : queue_(std::move(queue)) {}
  const char* name() const noexcept override { return queue_->name(); }
  int depth() const noexcept override { return queue_->depth(); }
  int in_flight() const noexcept override { return queue_->in_flight(); }
  void submit(std::span<const tiers::DiskRequest> requests) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    queue_->submit(requests);
  }
  std::optional<tiers::DiskCompletion> reap(bool wait) override { return queue_->reap(wait); }

 private:
  std::unique_ptr<tiers::DiskQueue> queue_;
};

/// One rank's trace of steps 3 to 8, its optimizer's states on a slow disk.
TraceReader trace_with_a_slow_disk(int stage, const data::TemporaryFolder& folder) {
  const auto text = folder.write("text", std::string(4000, 'x'));
  nlohmann::json root = nlohmann::json::parse(R"({
    "engine": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "train_micro_batch_size_per_gpu": 1,
               "managed_gradient_accumulation": false,
               "zero_optimization": {"sub_group_size": 8192, "offload_optimizer": {"device": "nvme"}}},
    "model": {"layers": 4, "width": 32, "heads": 2, "context": 16},
    "data": {"held_out": 0},
    "train": {"steps": 9, "window": [2, 2], "device": "cpu"}})");
  root["engine"]["zero_optimization"]["stage"] = stage;
  root["engine"]["zero_optimization"]["offload_optimizer"]["nvme_path"] = folder.path().string();
  root["data"]["path"] = text.string();
  const RunFile run = RunFile::from_json(root, "test");
  const std::string file = (folder.path() / "trace.json").string();
  testing::wrap_disk_queues([](auto queue, const auto&) { return std::make_unique<SlowDisk>(std::move(queue)); });
  testing::run_ranks(1, [&](const World& world) {
    const auto corpus = std::make_shared<const data::Corpus>(data::Corpus::open({.path = run.data.path}));
    const auto windows = std::make_shared<const data::Windows>(
        corpus, data::WindowOptions{.length = run.model.context, .held_out = run.data.held_out});
    Trainer trainer(run, world, windows);
    RunTrace trace({file, StepRange{3, 8}}, run.train.steps, world.rank(), world.size());
    for (std::int64_t step = 1; !trainer.finished(); ++step) {
      trace.begin(step);
      trainer.step();
      trace.end(step, trainer.finished());
      EXPECT_EQ(trace.written().empty(), step < 8) << step;
    }
  });
  testing::wrap_disk_queues({});
  return TraceReader(file);
}

class SlowDiskTrace : public ::testing::TestWithParam<int> {};

TEST_P(SlowDiskTrace, ShowsEachLaneAndUpdatesUnderTheForwardOfTheNextWindow) {
  const data::TemporaryFolder folder;
  const TraceReader trace = trace_with_a_slow_disk(GetParam(), folder);
  const auto steps = trace.lane("steps");
  ASSERT_EQ(steps.size(), 6u);
  for (std::size_t k = 0; k < steps.size(); ++k) EXPECT_EQ(steps[k].name, "step " + std::to_string(k + 3));

  // Calls come in the order of the windows: two forwards and backwards, then the step() whose updates follow it.
  std::vector<TraceSpan> calls, forwards = trace.lane("compute", "forward");
  for (const TraceSpan& call : trace.lane("caller", "step")) calls.push_back(call);
  ASSERT_EQ(calls.size(), 6u);
  ASSERT_EQ(forwards.size(), 12u);
  EXPECT_EQ(trace.lane("compute", "backward").size(), 12u);
  int under = 0;
  for (std::size_t k = 0; k + 1 < calls.size(); ++k) {
    EXPECT_TRUE(steps[k].holds(calls[k]));
    const TraceSpan& next_forward = forwards[2 * (k + 1)];
    EXPECT_TRUE(steps[k + 1].holds(next_forward));
    for (const TraceSpan& update : trace.lane("host update"))
      if (update.begin > calls[k].begin && update.begin < calls[k + 1].begin && update.overlaps(next_forward)) ++under;
  }
  EXPECT_GT(under, 0);

  trace.expect_nested();
  trace.expect_named("host update", "update blocks.3");
  trace.expect_named("host add", "first gradient of blocks.3");
  trace.expect_named("host add", "gradient of blocks.3");
  trace.expect_named("reduce", "reduce blocks.3");
  trace.expect_named("caller waits", "update of blocks.0");
  trace.expect_named("host waits", "chunk 1");
  EXPECT_TRUE(trace.lane("copies").empty()) << "a CPU device has nothing to copy";
  for (const char* kind : {"read chunk ", "write chunk "}) {
    const auto moves = trace.lane("disk", kind);
    ASSERT_FALSE(moves.empty()) << kind;
    EXPECT_TRUE(moves[0].name.find(" of optim") != std::string::npos) << moves[0].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, SlowDiskTrace, ::testing::Values(2, 3));

}  // namespace
}  // namespace ballast::cli
