// The training loop through the engine, ranks as threads: what a run says must not depend on how it is spread.
#include "cli/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>

#include "ballast/comm/testing.h"
#include "tests/data/temporary_folder.h"

namespace ballast::cli {
namespace {

std::string text() {
  std::string text;
  for (int i = 0; text.size() < 6000; ++i) text += "for i in range(" + std::to_string(i % 17) + "):\n    print(i)\n";
  return text;
}

/// 4 windows of 32 a step over all ranks, whatever their number.
RunFile run_with(const std::filesystem::path& file, int world, int stage, bool managed = false) {
  nlohmann::json root = nlohmann::json::parse(R"({
    "engine": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0},
    "model": {"layers": 2, "width": 32, "heads": 2, "context": 32},
    "data": {"held_out": 0.1},
    "train": {"steps": 12, "seed": 5, "device": "cpu", "eval_windows": 15},
    "sample": {"count": 20, "prompt": "for", "temperature": 0.5}})");
  root["data"]["path"] = file.string();
  root["engine"]["train_micro_batch_size_per_gpu"] = 4 / world;
  root["engine"]["zero_optimization"]["stage"] = stage;
  root["engine"]["managed_gradient_accumulation"] = managed;
  if (managed)
    root["engine"]["gradient_accumulation_steps"] = 2;
  else
    root["train"]["window"] = {1, 3};
  return RunFile::from_json(root, "test");
}

struct Outcome {
  std::vector<double> nats, norms;
  std::vector<std::int64_t> tokens, lengths, sample;
  double held_out = 0;
};

Outcome train(const RunFile& run, int world_size) {
  std::vector<Outcome> ranks(static_cast<std::size_t>(world_size));
  testing::run_ranks(world_size, [&](const World& world) {
    auto corpus = std::make_shared<const data::Corpus>(data::Corpus::open({.path = run.data.path}));
    auto windows = std::make_shared<const data::Windows>(
        corpus, data::WindowOptions{.length = run.model.context, .held_out = run.data.held_out});
    Trainer trainer(run, world, windows);
    Outcome& outcome = ranks[static_cast<std::size_t>(world.rank())];
    while (!trainer.finished()) {
      const StepResult result = trainer.step();
      outcome.nats.push_back(result.nats);
      outcome.norms.push_back(result.report.grad_norm);
      outcome.tokens.push_back(result.tokens);
      outcome.lengths.push_back(result.report.micro_batches);
      EXPECT_TRUE(result.report.applied);
      EXPECT_FALSE(result.stop);
      EXPECT_EQ(result.held_out_nats.has_value(), trainer.finished());
      if (result.held_out_nats) outcome.held_out = *result.held_out_nats;
    }
    outcome.sample = trainer.sample();
  });
  for (const Outcome& other : ranks) {
    EXPECT_EQ(other.nats, ranks[0].nats);
    EXPECT_EQ(other.held_out, ranks[0].held_out);
    EXPECT_EQ(other.sample, ranks[0].sample);
  }
  return ranks[0];
}

class TrainerTest : public ::testing::Test {
 protected:
  data::TemporaryFolder folder_;
  const std::filesystem::path file_ = folder_.write("text", text());
};

TEST_F(TrainerTest, LearnsTheSameOnAnyNumberOfRanksAndInEveryStage) {
  const Outcome one = train(run_with(file_, 1, 0), 1);
  EXPECT_NEAR(one.nats.front(), std::log(256), 0.1);
  EXPECT_LT(one.nats.back(), 3);
  EXPECT_LT(one.held_out, 3);
  EXPECT_EQ(one.sample.size(), 20u);
  for (const int stage : {0, 2, 3}) {
    const Outcome two = train(run_with(file_, 2, stage), 2);
    EXPECT_EQ(two.tokens, one.tokens);
    EXPECT_EQ(two.lengths, one.lengths);
    for (std::size_t i = 0; i < one.nats.size(); ++i) {
      EXPECT_NEAR(two.nats[i], one.nats[i], 2e-3) << "stage " << stage << ", step " << i + 1;
      EXPECT_NEAR(two.norms[i] / one.norms[i], 1, 2e-2) << "stage " << stage << ", step " << i + 1;
    }
    EXPECT_NEAR(two.held_out, one.held_out, 2e-3) << "stage " << stage;
  }
}

TEST_F(TrainerTest, WindowsVaryAndEveryTokenIsCounted) {
  const RunFile run = run_with(file_, 2, 2);
  const Outcome outcome = train(run, 2);
  std::set<std::int64_t> lengths(outcome.lengths.begin(), outcome.lengths.end());
  EXPECT_EQ(lengths, (std::set<std::int64_t>{1, 2, 3}));
  for (std::size_t i = 0; i < outcome.lengths.size(); ++i) {
    EXPECT_EQ(outcome.lengths[i], window_length(run.train, static_cast<std::int64_t>(i + 1)));
    EXPECT_EQ(outcome.tokens[i], outcome.lengths[i] * 4 * 32);
  }
}

TEST_F(TrainerTest, ManagedWindowsAndCheckpointedActivationsTrainToo) {
  const Outcome managed = train(run_with(file_, 2, 2, /*managed=*/true), 2);
  EXPECT_EQ(managed.lengths, std::vector<std::int64_t>(12, 2));
  RunFile checkpointed = run_with(file_, 2, 2, true);
  checkpointed.train.activation_checkpointing = true;
  const Outcome same = train(checkpointed, 2);
  EXPECT_EQ(same.nats, managed.nats);
  EXPECT_EQ(same.norms, managed.norms);
}

// A run in two parts, the second on other ranks and in another stage.
TEST_F(TrainerTest, GoesOnOnAnotherNumberOfRanks) {
  const Outcome whole = train(run_with(file_, 1, 0), 1);
  for (const int world : {1, 2, 4}) {
    RunFile first = run_with(file_, 2, 3);
    const std::filesystem::path saved = folder_.path() / ("saved" + std::to_string(world));
    first.save.folder = saved.string();
    constexpr std::int64_t kSavedAfter = 5;
    const auto open = [&] {
      auto corpus = std::make_shared<const data::Corpus>(data::Corpus::open({.path = file_.string()}));
      return std::make_shared<const data::Windows>(
          corpus, data::WindowOptions{.length = first.model.context, .held_out = first.data.held_out});
    };
    testing::run_ranks(2, [&](const World& ranks) {
      Trainer trainer(first, ranks, open());
      while (trainer.steps() < kSavedAfter) trainer.step();
      trainer.save({{"tokens", 77}});
    });
    testing::run_ranks(world, [&](const World& ranks) {
      Trainer trainer(run_with(file_, world, 1), ranks, open());
      const auto sums = trainer.resume(find_resume_point("auto", saved));
      ASSERT_TRUE(sums.has_value());
      EXPECT_EQ((*sums)["tokens"], 77);
      EXPECT_EQ(trainer.steps(), kSavedAfter);
      EXPECT_FALSE(trainer.resume(find_resume_point("auto", saved / "none")).has_value());
      while (!trainer.finished()) {
        const StepResult result = trainer.step();
        const auto at = static_cast<std::size_t>(result.step - 1);
        EXPECT_NEAR(result.nats, whole.nats[at], 1e-4) << world << " ranks, step " << result.step;
        EXPECT_EQ(result.tokens, whole.tokens[at]);
      }
    });
  }
}

TEST_F(TrainerTest, EvaluationDoesNotDependOnTheSpread) {
  // 15 windows in batches of 4 / world: rounds that the ranks fill unequally, and a rank with nothing in the last.
  std::vector<double> nats;
  for (const int world_size : {1, 2, 4}) {
    std::mutex mutex;
    testing::run_ranks(world_size, [&](const World& world) {
      const RunFile run = run_with(file_, world_size, 0);
      auto corpus = std::make_shared<const data::Corpus>(data::Corpus::open({.path = run.data.path}));
      auto windows = std::make_shared<const data::Windows>(corpus, data::WindowOptions{.length = 32, .held_out = 0.1});
      Trainer trainer(run, world, windows);
      const Evaluation evaluation = trainer.evaluate();
      EXPECT_EQ(evaluation.tokens, 15 * 32);
      std::lock_guard lock(mutex);
      nats.push_back(evaluation.nats);
    });
  }
  for (const double value : nats) EXPECT_NEAR(value, nats[0], 1e-6);
}

}  // namespace
}  // namespace ballast::cli
