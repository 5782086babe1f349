// Stage 3 against stage 0 on two ranks (threads, Gloo, one core each): same model and batches, blocks of windows taking
// turns, every block with an engine of its own, since stage 3's observer would tax the other's operators too. Prints
// stage 3's speed in units of stage 0's, with everything sharded, with the default limits, and with room for two blocks
// only, where backward gathers again what forward has let go.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "ballast/comm/testing.h"
#include "ballast/engine/engine.h"
#include "ballast/models/gpt.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;

constexpr double kLeast = 0.9;

struct Side {
  const char* name;
  nlohmann::json zero;
};

struct Problem {
  models::GptOptions model;
  std::int64_t batch;
  int turns, windows;
};

/// Seconds of each window after the first two, which learn the order and touch fresh memory.
std::vector<double> block(const Problem& problem, const Side& side, const World& world) {
  models::Gpt model(problem.model);
  const auto config = Config::from_json({{"train_micro_batch_size_per_gpu", problem.batch},
                                         {"steps_per_print", 0},
                                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 1e-4}}}}},
                                         {"zero_optimization", side.zero}});
  Engine engine(model.ptr(), config, world);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(world.rank() + 1);
  const at::Tensor tokens = at::randint(0, problem.model.vocabulary, {problem.batch, problem.model.context + 1},
                                        generator, at::TensorOptions(at::kLong));
  const at::Tensor inputs = tokens.narrow(1, 0, problem.model.context).contiguous();
  const at::Tensor targets = tokens.narrow(1, 1, problem.model.context).contiguous();

  std::vector<double> seconds;
  for (int w = 0; w < problem.windows + 2; ++w) {
    const double elapsed = bench::seconds_of([&] {
      engine.backward(model->loss(inputs, targets));
      engine.step();
    });
    if (w >= 2) seconds.push_back(elapsed);
  }
  engine.shutdown();
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Speed of stage 3 against stage 0, two ranks on the CPU.");
  Problem problem;
  problem.model.layers = flags.number("layers", 4, "blocks of the model");
  problem.model.width = flags.number("width", 256, "width of the model");
  problem.model.heads = flags.number("heads", 4, "attention heads");
  problem.model.context = flags.number("sequence", 128, "tokens a sequence");
  problem.batch = flags.number("batch", 8, "sequences a rank and window");
  problem.turns = static_cast<int>(flags.number("turns", 5, "blocks of each side"));
  problem.windows = static_cast<int>(flags.number("windows", 5, "measured windows a block"));
  flags.finish();

  const std::int64_t width = problem.model.width;
  const std::int64_t two_blocks = 2 * (12 * width * width + 16 * width);
  const std::vector<Side> sides = {
      {"stage 0", {{"stage", 0}}},
      {"stage 3, all sharded", {{"stage", 3}, {"stage3_param_persistence_threshold", 0}}},
      {"stage 3, default limits", {{"stage", 3}}},
      {"stage 3, room for two blocks",
       {{"stage", 3}, {"stage3_param_persistence_threshold", 0}, {"stage3_max_live_parameters", two_blocks}}}};

  std::vector<std::vector<double>> all(sides.size());     // windows of rank 0
  std::vector<std::vector<double>> speeds(sides.size());  // a turn each
  testing::run_ranks(2, [&](const World& world) {
    for (int turn = 0; turn < problem.turns; ++turn) {
      std::vector<double> medians;
      for (std::size_t s = 0; s < sides.size(); ++s) {
        const std::vector<double> seconds = block(problem, sides[s], world);
        medians.push_back(bench::median(seconds));
        if (world.rank() == 0) all[s].insert(all[s].end(), seconds.begin(), seconds.end());
      }
      for (std::size_t s = 0; world.rank() == 0 && s < sides.size(); ++s) speeds[s].push_back(medians[0] / medians[s]);
    }
  });

  for (std::size_t s = 0; s < sides.size(); ++s) {
    std::printf("%-30s %8.2f ms a window", sides[s].name, bench::median(all[s]) * 1e3);
    if (s > 0) {
      const double speed = bench::median(speeds[s]);
      std::printf(", speed %.3f of stage 0's (wanted: at least %.2f) %s", speed, kLeast,
                  speed >= kLeast ? "reached" : "MISSED");
    }
    std::printf("\n");
  }
}
