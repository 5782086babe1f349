// Writes the checkpoint that read_with_safetensors.py reads: two ranks, stage 3, bf16, one step. usage: FOLDER
#include <torch/nn/module.h>

#include <cstdio>

#include "ballast/comm/testing.h"
#include "ballast/engine/engine.h"
#include "tests/engine/support/cell.h"
#include "tests/engine/support/lin.h"

namespace {

using namespace ballast;
using namespace ballast::testing;

struct Sample : torch::nn::Module {
  Sample() {
    lin = register_module("lin", ballast::testing::lin({{"a.p", {3, 50}, 1},
                                                        {"b.p", {70}, 2},
                                                        {"empty.p", {0, 4}},
                                                        {"scalar.p", {}, 3},
                                                        {"cold.p", {2, 3}, .5, false}}));
    lin->tie("a.p", "tied.p");
    counts = register_buffer("counts", at::arange(5, at::kLong));
  }
  std::shared_ptr<Lin> lin;
  at::Tensor counts;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string folder = argv[1];
  run_ranks(
      2,
      [&](const World& world) {
        auto model = std::make_shared<Sample>();
        Engine engine(model, Config::from_json(settings({3, Placement::kHost, DType::kBFloat16, true})), world);
        engine.backward(loss_of(*model->lin, {{"a.p", 1}, {"b.p", 3}, {"scalar.p", 1}}));
        engine.step();
        engine.backward(loss_of(*model->lin, {{"b.p", 2.0 + world.rank()}}));
        SaveOptions options;
        options.include_window = true;
        options.client_state = R"({"epoch": 7})";
        engine.save_checkpoint(folder, "", options);
      },
      thread_options());
  return 0;
}
