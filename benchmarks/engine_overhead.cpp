// The engine at stage 0 on one rank against a plain LibTorch loop: same model, same batches, at::_fused_adamw_ on the
// other side, windows taking turns. Prints the engine's speed in units of the plain loop's.

#include <torch/torch.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "ballast/engine/engine.h"
#include "ballast/models/gpt.h"
#include "benchmarks/measure.h"

namespace {

using namespace ballast;

constexpr double kLeast = 0.98;
constexpr double kLr = 1e-4, kDecay = 0.1;

/// The loop that one writes without the engine.
class PlainLoop {
 public:
  explicit PlainLoop(models::Gpt model) : model_(std::move(model)), parameters_(model_->parameters()) {
    for (const at::Tensor& parameter : parameters_) {
      first_.push_back(at::zeros_like(parameter));
      second_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}, parameter.options().requires_grad(false)));
    }
  }

  double window(const at::Tensor& inputs, const at::Tensor& targets) {
    const at::Tensor loss = model_->loss(inputs, targets);
    loss.backward();
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    for (const at::Tensor& parameter : parameters_) grads.push_back(parameter.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, grads, first_, second_, {}, steps_, kLr, 0.9, 0.999, kDecay, 1e-8, false, false);
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
    return loss.item<double>();  // waits for all that is queued on a device
  }

 private:
  models::Gpt model_;
  std::vector<at::Tensor> parameters_, first_, second_, steps_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::Flags flags(argc, argv, "Speed of the engine at stage 0, one rank, against a plain LibTorch loop.");
  models::GptOptions options;
  options.vocabulary = flags.number("vocabulary", 256, "size of the vocabulary");
  options.layers = flags.number("layers", 4, "blocks of the model");
  options.width = flags.number("width", 256, "width of the model");
  options.heads = flags.number("heads", 4, "attention heads");
  options.context = flags.number("sequence", 128, "tokens a sequence");
  const std::int64_t batch = flags.number("batch", 8, "sequences a window");
  const int turns = static_cast<int>(flags.number("turns", 21, "windows of each side"));
  const std::string device = flags.text("device", "cpu", "cpu or cuda");
  flags.finish();

  const World world = World::single({.device = device});
  models::Gpt plain_model(options);
  plain_model->to(world.device());
  PlainLoop plain(plain_model);
  models::Gpt model(options);
  const auto config =
      Config::from_json({{"train_micro_batch_size_per_gpu", batch},
                         {"steps_per_print", 0},
                         {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", kLr}, {"weight_decay", kDecay}}}}}});
  Engine engine(model.ptr(), config, world);

  torch::manual_seed(1);
  const at::Tensor tokens = torch::randint(options.vocabulary, {batch, options.context + 1}).to(world.device());
  const at::Tensor inputs = tokens.narrow(1, 0, options.context).contiguous();
  const at::Tensor targets = tokens.narrow(1, 1, options.context).contiguous();

  double plain_loss = 0, engine_loss = 0;
  const auto plain_window = [&] { plain_loss = plain.window(inputs, targets); };
  const auto engine_window = [&] {
    const at::Tensor loss = model->loss(inputs, targets);
    engine.backward(loss);
    engine.step();
    engine_loss = loss.item<double>();
  };
  bench::take_turns(2, plain_window, engine_window);  // warm up
  const bench::Turns turn = bench::take_turns(turns, plain_window, engine_window);

  std::printf("plain loop  %8.2f ms a window (processors %8.2f), loss %.6f\n", turn.base.seconds * 1e3,
              turn.base.cpu * 1e3, plain_loss);
  std::printf("engine      %8.2f ms a window (processors %8.2f), loss %.6f\n", turn.other.seconds * 1e3,
              turn.other.cpu * 1e3, engine_loss);
  std::printf("engine's speed %.3f of the plain loop's (wanted: at least %.2f) %s; by processor time %.3f\n",
              turn.speed.seconds, kLeast, turn.speed.seconds >= kLeast ? "reached" : "MISSED", turn.speed.cpu);
}
