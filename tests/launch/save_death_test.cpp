// A rank that is killed while a checkpoint is saved, before any of its calls to the system: the others end by
// themselves, and what was saved before can be loaded; so can the new one, if it appeared.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>

#include "ballast/base/error.h"
#include "ballast/base/remove_tree.h"
#include "ballast/checkpoint/testing.h"
#include "ballast/engine/engine.h"
#include "tests/launch/support/processes.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;
using testing::Ended;
using testing::Processes;
using testing::variable;

constexpr int kRanks = 2;

// ---- the ranks ----

nlohmann::json settings() {
  return {{"train_micro_batch_size_per_gpu", 1},
          {"managed_gradient_accumulation", false},
          {"steps_per_print", 0},
          {"comm_timeout_seconds", 20},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}}}}},
          {"zero_optimization", {{"stage", 3}, {"stage3_param_persistence_threshold", 0}}}};
}

std::shared_ptr<torch::nn::LinearImpl> net() {
  torch::manual_seed(1);
  return std::make_shared<torch::nn::LinearImpl>(32, 32);
}

void window(Engine& engine, torch::nn::LinearImpl& net) {
  engine.backward(net.forward(torch::ones({1, 32})).square().mean());
  engine.step();
}

/// This rank, with an engine.
struct Rank {
  Rank() : world(make_world()), model(net()), engine(model, Config::from_json(settings()), world) {}
  static World make_world() {
    at::set_num_threads(1);
    WorldOptions options;
    options.device = "cpu";
    return World::from_env(options);
  }
  const World world;
  const std::shared_ptr<torch::nn::LinearImpl> model;
  Engine engine;
};

const testing::Scenario dying("dying in a save", [] {
  Rank rank;
  Engine& engine = rank.engine;
  const fs::path folder = variable("FOLDER");
  window(engine, *rank.model);
  engine.save_checkpoint(folder);
  window(engine, *rank.model);

  std::atomic<int> left = std::stoi(variable("CALL"));
  const bool dies = rank.world.rank() == std::stoi(variable("VICTIM"));
  const testing::FileFaults faults([&](testing::FileOp, const fs::path&) -> testing::FileFault {
    if (dies && --left == 0) raise(SIGKILL);
    return {};
  });
  SaveOptions save;
  save.asynchronous = variable("ASYNCHRONOUS") == "1";
  engine.save_checkpoint(folder, "", save);
  for (int i = 0; i < 20; ++i) window(engine, *rank.model);
  engine.synchronize();  // an asynchronous save dies here at the latest
  return 0;
});

const testing::Scenario loading("loading what is left", [] {
  Rank rank;
  Engine& engine = rank.engine;
  const LoadReport report = engine.load_checkpoint(variable("FOLDER"));
  const std::int64_t steps = engine.counters().applied_steps;
  const bool fits = report.tag == "global_step" + std::to_string(steps) && (steps == 1 || steps == 2);
  engine.save_checkpoint(variable("FOLDER"), "next");
  return fits ? 0 : 1;
});

// ---- the tests ----

struct Death {
  int victim;
  bool asynchronous;
};

class DeathInASave : public ::testing::TestWithParam<Death> {};

TEST_P(DeathInASave, LeavesACheckpointThatLoads) {
  const Death death = GetParam();
  for (const int call : {1, 5, 12}) {
    SCOPED_TRACE("call " + std::to_string(call));
    const fs::path folder = fs::temp_directory_path() / ("ballast-save-death-" + std::to_string(getpid()));
    remove_tree(folder);
    Processes processes("dying in a save");
    processes.start_all(kRanks, {{"FOLDER", folder.string()},
                                 {"VICTIM", std::to_string(death.victim)},
                                 {"CALL", std::to_string(call)},
                                 {"ASYNCHRONOUS", death.asynchronous ? "1" : "0"}});
    const std::vector<Ended> ends = processes.join();
    const Ended &victim = ends[static_cast<std::size_t>(death.victim)],
                &other = ends[static_cast<std::size_t>(1 - death.victim)];
    const bool died = victim.exit_code == -SIGKILL;  // else it makes fewer calls
    EXPECT_TRUE(died || victim.exit_code == 0) << victim.output;
    EXPECT_FALSE(other.hung) << other.output;
    EXPECT_EQ(other.exit_code, died ? 1 : 0) << other.output;
    if (call == 1) {
      EXPECT_TRUE(died);
    }
    Processes loads("loading what is left");
    loads.start_all(kRanks, {{"FOLDER", folder.string()}});
    for (const Ended& end : loads.join()) EXPECT_EQ(end.exit_code, 0) << end.output;
    for (const auto& entry : fs::directory_iterator(folder))
      EXPECT_NE(entry.path().filename().string().front(), '.') << entry.path();  // the next save cleans up
    remove_tree(folder);
  }
}

INSTANTIATE_TEST_SUITE_P(Launch, DeathInASave,
                         ::testing::Values(Death{0, false}, Death{1, false}, Death{0, true}, Death{1, true}),
                         [](const ::testing::TestParamInfo<Death>& info) {
                           return std::string(info.param.asynchronous ? "Asynchronous" : "Synchronous") + "OfRank" +
                                  std::to_string(info.param.victim);
                         });

}  // namespace
}  // namespace ballast
