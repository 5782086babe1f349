// A rank that is killed while its swap file is read or written: the others end with an error, nothing is left that the
// next run would trip over, and that run removes what the dead one left.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>

#include "ballast/engine/engine.h"
#include "ballast/tiers/testing.h"
#include "tests/data/temporary_folder.h"
#include "tests/launch/support/processes.h"
#include "tests/tiers/faulty_disk.h"

namespace ballast {
namespace {

using testing::Ended;
using testing::Processes;
using testing::variable;

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int kWindows = 12;

nlohmann::json settings() {
  const std::string folder = variable("FOLDER");
  const int stage = std::stoi(variable("STAGE"));
  const nlohmann::json on_disk = {{"device", "nvme"}, {"nvme_path", folder}};
  nlohmann::json zero = {{"stage", stage},
                         {"stage3_param_persistence_threshold", 0},
                         {"sub_group_size", 256},
                         {"offload_optimizer", on_disk},
                         {"offload_gradients", on_disk}};
  if (stage == 3) {
    zero["offload_param"] = on_disk;
    zero["offload_param"]["max_in_cpu"] = 0;
  }
  return {{"train_micro_batch_size_per_gpu", 1},
          {"managed_gradient_accumulation", false},
          {"steps_per_print", 0},
          {"comm_timeout_seconds", 20},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
          {"zero_optimization", zero}};
}

const testing::Scenario swapping("swapping", [] {
  at::set_num_threads(1);
  const World world = World::from_env({.device = "cpu"});
  const std::string fatal = variable("FATAL_FILE");
  int requests = 0;
  if (world.rank() == 1 && !fatal.empty())
    testing::wrap_disk_queues([&](std::unique_ptr<tiers::DiskQueue> queue, const fs::path& file) {
      if (file.filename() != fatal) return queue;
      return std::unique_ptr<tiers::DiskQueue>(
          std::make_unique<tiers::FaultyDisk>(std::move(queue), [&](const tiers::DiskRequest&) {
            if (++requests == 40) raise(SIGKILL);  // after some whole windows
            return tiers::Fault::none();
          }));
    });
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) net->push_back(torch::nn::Linear(32, 32));
  Engine engine(net.ptr(), Config::from_json(settings()), world);
  for (int window = 0; window < kWindows; ++window) {
    for (int k = 0; k < 2; ++k)
      engine.backward(net->forward(torch::ones({1, 32}) * (world.rank() + k + 1)).square().mean());
    engine.step();
  }
  engine.synchronize();
  return 0;
});

struct Fatal {
  int stage;
  const char* file;
};

class KilledMidSwap : public ::testing::TestWithParam<Fatal> {};

TEST_P(KilledMidSwap, EndsTheOthersAndTheNextRunStartsClean) {
  const data::TemporaryFolder folder;
  testing::Variables variables{
      {"STAGE", std::to_string(GetParam().stage)}, {"FOLDER", folder.path().string()}, {"FATAL_FILE", GetParam().file}};
  {
    Processes processes("swapping");
    processes.start_all(kRanks, variables);
    const Ended survivor = processes.join(0), killed = processes.join(1);
    EXPECT_EQ(killed.exit_code, -SIGKILL) << killed.output;
    EXPECT_FALSE(survivor.hung);
    EXPECT_GT(survivor.exit_code, 0) << survivor.output;
    EXPECT_NE(survivor.output.find("rank 1"), std::string::npos) << survivor.output;
  }
  EXPECT_FALSE(fs::is_empty(folder.path())) << "a killed rank can't remove its folders";
  variables["FATAL_FILE"] = "";
  Processes processes("swapping");
  processes.start_all(kRanks, variables);
  std::string output;
  for (const Ended& ended : processes.join()) {
    EXPECT_EQ(ended.exit_code, 0) << ended.output;
    output += ended.output;
  }
  EXPECT_NE(output.find("of dead runs"), std::string::npos) << output;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

INSTANTIATE_TEST_SUITE_P(Files, KilledMidSwap,
                         ::testing::Values(Fatal{0, "optimizer.swap"}, Fatal{2, "optimizer.swap"},
                                           Fatal{2, "gradients.swap"}, Fatal{3, "parameters.swap"}),
                         [](const auto& info) {
                           std::string file = info.param.file;
                           return "Stage" + std::to_string(info.param.stage) + "_" + file.substr(0, file.find('.'));
                         });

}  // namespace
}  // namespace ballast
