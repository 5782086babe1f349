#include <ballast/ballast.h>
#include <torch/torch.h>

int main() {
  auto world = ballast::World::from_env();  // the ranks that torchrun started, or one
  auto config = ballast::Config::from_string(R"({"managed_gradient_accumulation": false, "steps_per_print": 0,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})");
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  ballast::Engine engine(model.ptr(), config, world);  // any torch::nn::Module, unmodified
  for (int window = 0; window < 100; ++window) {
    for (int i = 0; i <= window % 3; ++i) {  // how many backwards, the engine learns from step()
      auto x = torch::randn({16 * (i + 1), 8}, world.device());
      engine.backward(torch::mse_loss(model->forward(x), x.sum(1, true)), {.weight = x.size(0)});
    }
    auto report = engine.step();
    if (world.rank() == 0)
      ballast::log_info("window ", window, ": ", to_string(report.reason), ", ", report.micro_batches,
                        " backwards, gradient norm ", report.grad_norm);
  }
}
