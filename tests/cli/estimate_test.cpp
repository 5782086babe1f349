// `ballast estimate` against engines that run: every stage and placement, and which of them is the run's own.
#include "cli/estimate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "ballast/comm/testing.h"
#include "tests/data/temporary_folder.h"

namespace ballast::cli {
namespace {

using nlohmann::json;

RunFile run_with(const char* zero, const std::filesystem::path& folder) {
  json root = json::parse(R"({
    "engine": {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": false},
    "model": {"layers": 2, "width": 32, "heads": 2, "context": 16},
    "data": {"path": "text"}, "train": {"window": [1, 3], "device": "cpu"}})");
  root["engine"]["zero_optimization"] = json::parse(zero);
  root["train"]["folder"] = folder.string();
  return RunFile::from_json(root, "test");
}

std::vector<std::string> own_rows(const RunFile& run) {
  std::vector<Placement> placements = all_placements();
  for (Placement& placement : placements) placement.planned = plan(placed(run, placement), 2, c10::DeviceType::CPU);
  std::vector<std::string> own;
  for (const std::string& line : placement_table(run, placements))
    if (line.ends_with("this run")) own.push_back(line.substr(0, 39));
  return own;
}

TEST(Estimate, HasEveryStageAndPlacementOnce) {
  EXPECT_EQ(all_placements().size(), 4u * 3 + 2 * 3);
  std::vector<std::string> rows;
  for (const Placement& placement : all_placements()) {
    rows.push_back(std::to_string(placement.stage) + std::to_string(static_cast<int>(placement.params)) +
                   std::to_string(static_cast<int>(placement.states)));
    EXPECT_TRUE(placement.params == OffloadDevice::kNone || placement.stage == 3);
  }
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(std::unique(rows.begin(), rows.end()), rows.end());
}

TEST(Estimate, MarksTheRowOfTheRunsOwnPlacementAlone) {
  using Rows = std::vector<std::string>;
  EXPECT_EQ(own_rows(run_with(R"({"stage": 1})", "x")), Rows{"1            device       device       "});
  EXPECT_EQ(own_rows(run_with(R"({"stage": 2, "offload_optimizer": {"device": "cpu"}})", "x")),
            Rows{"2            device       host         "});
  EXPECT_EQ(own_rows(run_with(R"({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "y"}})", "x")),
            Rows{"2            device       nvme         "});
  EXPECT_EQ(own_rows(run_with(R"({"stage": 3, "offload_param": {"device": "cpu"},
                                  "offload_optimizer": {"device": "nvme", "nvme_path": "y"}})",
                              "x")),
            Rows{"3            host         nvme         "});
}

TEST(Estimate, KeepsTheRunsOwnConfigurationAndItsFolder) {
  const RunFile run = run_with(R"({"stage": 2, "offload_gradients": {"device": "cpu"},
                                   "offload_optimizer": {"device": "nvme", "nvme_path": "y", "ratio": 0.5}})",
                               "x");
  for (const Placement& placement : all_placements()) {
    const RunFile other = placed(run, placement);
    EXPECT_EQ(other.engine == run.engine, is_own(run, placement));
    EXPECT_EQ(other.engine.zero.offload_optimizer.nvme_path, "y");
    EXPECT_NO_THROW(check_placements(other.engine.zero));
  }
  EXPECT_EQ(placed(run_with(R"({"stage": 1})", "x"), all_placements().back()).engine.zero.offload_optimizer.nvme_path,
            "x");
}

void expect_measured_as_planned(const RunFile& run, int ranks) {
  for (const Placement& placement : all_placements()) {
    const RunFile other = placed(run, placement);
    const auto planned = plan(other, ranks, c10::DeviceType::CPU);
    testing::run_ranks(ranks, [&](const World& world) {
      const auto measured = measure(other, world);
      for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
        const auto want = static_cast<double>(planned->total(tier).peak);
        EXPECT_NEAR(static_cast<double>(measured->total(tier).peak), want, 0.02 * want)
            << "stage " << placement.stage << ", " << static_cast<int>(placement.params) << ", "
            << static_cast<int>(placement.states) << ", tier " << static_cast<int>(tier) << ", ranks " << ranks;
        EXPECT_EQ(want > 0, tier == Tier::kDevice ||
                                (tier == Tier::kHost && (placement.states != OffloadDevice::kNone ||
                                                         placement.params != OffloadDevice::kNone)) ||
                                (tier == Tier::kNvme && (placement.states == OffloadDevice::kNvme ||
                                                         placement.params == OffloadDevice::kNvme)));
      }
    });
  }
}

TEST(Estimate, IsWhatTheLedgerOfARunShows) {
  data::TemporaryFolder folder;
  for (const char* zero : {R"({"stage": 2})", R"({"stage": 3, "stage3_param_persistence_threshold": 0})"})
    for (const int ranks : {1, 2}) expect_measured_as_planned(run_with(zero, folder.path()), ranks);
}

TEST(Estimate, IsWhatTheLedgerOfALlamasRunShows) {
  data::TemporaryFolder folder;
  RunFile run = run_with(R"({"stage": 3, "stage3_param_persistence_threshold": 0})", folder.path());
  run.model.norm = models::NormKind::kRms;
  run.model.positions = models::PositionKind::kRotary;
  run.model.mlp = models::MlpKind::kSwiglu;
  run.model.heads = 4;
  run.model.key_heads = 2;
  run.model.bias = run.model.tied_head = false;
  expect_measured_as_planned(run, 2);
}

}  // namespace
}  // namespace ballast::cli
