// Stage 3 against stage 0 on two ranks (threads, or two processes of torchrun; Gloo, one core each): same model and
// batches, blocks of windows taking turns, every block with an engine of its own, since stage 3's observer would tax
// the other's operators too. Prints stage 3's speed in units of stage 0's, with everything sharded and with the default
// limits, and for comparison with room for two blocks only, where backward pays for memory by gathering again what
// forward has let go.

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
  bool judged = true;
};

struct Problem {
  models::GptOptions model;
  std::int64_t batch;
  int turns, windows;
};

/// Medians over the windows after the first two, which learn the order and touch fresh memory.
bench::Cost block(const Problem& problem, const Side& side, const World& world) {
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

  std::vector<double> seconds, cpu;
  for (int w = 0; w < problem.windows + 2; ++w) {
    const bench::Cost cost = bench::cost_of([&] {
      engine.backward(model->loss(inputs, targets));
      engine.step();
    });
    if (w < 2) continue;
    seconds.push_back(cost.seconds);
    cpu.push_back(cost.cpu);
  }
  engine.shutdown();
  return {bench::median(seconds), bench::median(cpu)};
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
  problem.turns = static_cast<int>(flags.number("turns", 4, "blocks of each side"));
  problem.windows = static_cast<int>(flags.number("windows", 5, "measured windows a block"));
  flags.finish();

  const std::int64_t width = problem.model.width;
  const std::int64_t two_blocks = 2 * (12 * width * width + 16 * width);
  const std::vector<Side> sides = {
      {"stage 0", {{"stage", 0}}},
      {"stage 3, all sharded", {{"stage", 3}, {"stage3_param_persistence_threshold", 0}}},
      {"stage 3, default limits", {{"stage", 3}}},
      {"stage 3, room for two blocks",
       {{"stage", 3}, {"stage3_param_persistence_threshold", 0}, {"stage3_max_live_parameters", two_blocks}},
       false}};

  std::vector<std::vector<bench::Cost>> costs(sides.size());  // of rank 0, by turn; processor time is all its threads'
  testing::run_ranks(2, [&](const World& world) {
    for (int turn = 0; turn < problem.turns; ++turn)
      for (std::size_t s = 0; s < sides.size(); ++s) {
        const bench::Cost cost = block(problem, sides[s], world);
        if (world.rank() == 0) costs[s].push_back(cost);
      }
  });

  if (costs[0].empty()) return 0;  // the process of another rank, or of another number of them, which has said so
  for (std::size_t s = 0; s < sides.size(); ++s) {
    std::vector<double> seconds, cpu, speeds, cpu_speeds;
    for (std::size_t turn = 0; turn < costs[s].size(); ++turn) {
      seconds.push_back(costs[s][turn].seconds);
      cpu.push_back(costs[s][turn].cpu);
      speeds.push_back(costs[0][turn].seconds / seconds.back());
      cpu_speeds.push_back(costs[0][turn].cpu / cpu.back());
    }
    std::printf("%-30s %8.2f ms a window (processors %8.2f)", sides[s].name, bench::median(seconds) * 1e3,
                bench::median(cpu) * 1e3);
    const double speed = bench::median(speeds);
    if (s > 0) std::printf(", speed %.3f of stage 0's, by processor time %.3f", speed, bench::median(cpu_speeds));
    if (s > 0 && sides[s].judged)
      std::printf(" (wanted: at least %.2f) %s", kLeast, speed >= kLeast ? "reached" : "MISSED");
    std::printf("\n");
  }
}
