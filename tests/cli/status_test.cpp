#include "cli/status.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "cli/text.h"
#include "cli/trainer.h"

namespace ballast::cli {
namespace {

StepResult window(std::int64_t step, double nats, std::int64_t tokens, double seconds) {
  StepResult result;
  result.step = step;
  result.report.applied = true;
  result.report.grad_norm = 0.5;
  result.report.micro_batches = 2;
  result.report.lr = {1e-3};
  result.nats = nats;
  result.tokens = tokens;
  result.seconds = seconds;
  return result;
}

TEST(Status, LineTellsLossSpeedTimeLeftAndMemory) {
  const auto ledger = Ledger::create();
  const auto params = ledger->track(MemoryKind::kParams, Tier::kDevice, 2048);
  const auto states = ledger->track(MemoryKind::kOptimizer, Tier::kHost, 1024);
  Status status(10, "byte");
  status.add(window(1, 5, 1000, 1), 0.1, *ledger);
  EXPECT_EQ(status.line(/*starts_interval=*/true),
            "step 1/10  loss 5.000  7.21 bits a byte  1.00 k bytes/s  left 9 s  norm 0.500  lr 1.00e-03  memory device "
            "2.00 KiB host 1.00 KiB");
  status.add(window(2, std::log(2), 6000, 2), 0.2, *ledger);  // the line before began an interval: 6000 in 2 s
  EXPECT_NE(status.line(false).find("loss 0.693  1.00 bits a byte  3.00 k bytes/s  left 12 s  norm"), std::string::npos)
      << status.line(false);
  EXPECT_EQ(status.summary(), "2 steps, 7.00 k bytes in 3 s (2.33 k bytes/s)");
}

TEST(Status, ASkippedStepIsSaid) {
  Status status(10, "token");
  StepResult result = window(1, 5, 1000, 1);
  result.report.applied = false;
  result.report.reason = StepReason::kNonFinite;
  status.add(result, 0.1, *Ledger::create());
  EXPECT_NE(status.line(false).find("left 9 s  not applied: non-finite gradient  lr"), std::string::npos)
      << status.line(false);
}

TEST(Status, SkippedStepsAreCountedAndAScaledLossShowsItsScale) {
  Status status(10, "byte", /*scaled=*/true);
  StepResult result = window(1, 5, 1000, 1);
  result.report.loss_scale = 65536;
  status.add(result, 0.1, *Ledger::create());
  EXPECT_NE(status.line(false).find("  lr 1.00e-03  loss scale 65536  memory"), std::string::npos)
      << status.line(false);
  EXPECT_EQ(status.summary(), "1 steps (loss scale 65536), 1.00 k bytes in 1 s (1.00 k bytes/s)");
  result.step = 2;
  result.report.applied = false;
  status.add(result, 0.2, *Ledger::create());
  result.step = 3;
  result.report.loss_scale = 32768;
  status.add(result, 0.3, *Ledger::create());
  EXPECT_EQ(status.summary(), "3 steps, 2 not applied (loss scale 32768), 3.00 k bytes in 3 s (1.00 k bytes/s)");
}

TEST(Status, RowHasACellForEachColumn) {
  for (const bool with_times : {false, true}) {
    Status status(10, "byte");
    StepResult result = window(3, 5, 1000, 1);
    if (with_times) result.times = {0.1, 0.2, 0.3, 0.4};
    status.add(result, 0.25, *Ledger::create());
    const auto columns = Status::columns(with_times);
    const auto row = status.row(with_times);
    ASSERT_EQ(row.size(), columns.size());
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (columns[i] == "step") {
        EXPECT_EQ(row[i], 3);
      }
      if (columns[i] == "epoch") {
        EXPECT_EQ(row[i], 0.25);
      }
      if (columns[i] == "held_out_bits") {
        EXPECT_EQ(row[i], std::nullopt);
      }
      if (columns[i] == "step_seconds") {
        EXPECT_EQ(row[i], 0.4);
      }
    }
  }
}

TEST(Status, CountsHaveThreeDigits) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1.00 k");
  EXPECT_EQ(format_count(372576), "373 k");
  EXPECT_EQ(format_count(46.4e6), "46.4 M");
  EXPECT_EQ(format_count(999999), "1.00 M");
  EXPECT_EQ(format_count(5e12), "5000 G");
}

TEST(Text, ControlCharactersCannotDriveTheTerminal) {
  EXPECT_EQ(printable("a\tb\n\x1b[2J\x7f\r"), "a\tb\n\\x1b[2J\\x7f\\x0d");
  EXPECT_EQ(printable("\u00e9 \u20ac \U0001f600"), "\u00e9 \u20ac \U0001f600");
  EXPECT_EQ(printable("\xc3(\xe2\x82"), "\\xc3(\\xe2\\x82");                  // cut short
  EXPECT_EQ(printable("\xc0\xaf\xe0\x80\x80"), "\\xc0\\xaf\\xe0\\x80\\x80");  // longer than they need be
  EXPECT_EQ(printable("\xed\xa0\x80\xf4\x90\x80\x80"), "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80");  // no characters
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b"
            "2J");  // a terminal's control sequence
}

TEST(Window, LengthsCoverTheirRangeAndDependOnTheSeed) {
  TrainSection train;
  train.window_min = 1;
  train.window_max = 4;
  train.seed = 3;
  std::array<int, 5> seen{};
  for (std::int64_t step = 1; step <= 4000; ++step) ++seen.at(static_cast<std::size_t>(window_length(train, step)));
  EXPECT_EQ(seen[0], 0);
  for (int length = 1; length <= 4; ++length) EXPECT_NEAR(seen[length], 1000, 120) << length;
  TrainSection other = train;
  other.seed = 4;
  int same = 0;
  for (std::int64_t step = 1; step <= 400; ++step) same += window_length(train, step) == window_length(other, step);
  EXPECT_NEAR(same, 100, 40);
  train.window_min = train.window_max = 3;
  EXPECT_EQ(window_length(train, 17), 3);
}

}  // namespace
}  // namespace ballast::cli
