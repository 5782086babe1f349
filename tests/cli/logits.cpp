// Logits of a model as the command line reads it: logits WEIGHTS TOKENS OUT
//   WEIGHTS: a folder of Hugging Face's, or of checkpoints; TOKENS, OUT: safetensors with tokens, int64
//   [batch, length], and logits, fp32 [batch, length, vocabulary].
#include <torch/torch.h>

#include <cstdio>

#include "ballast/checkpoint/safetensors.h"
#include "cli/weights.h"

namespace {

using namespace ballast;

at::Tensor read_tokens(const char* path) {
  ckpt::SafetensorsReader file(path, {});
  const ckpt::TensorInfo& info = file.find("tokens");
  at::Tensor tokens = torch::empty(info.shape, torch::kLong);
  file.read(info, 0, {static_cast<std::byte*>(tokens.mutable_data_ptr()), tokens.nbytes()});
  return tokens;
}

void write_logits(const char* path, const at::Tensor& logits) {
  ckpt::SafetensorsWriter file(path, {{"logits", torch::kFloat, logits.sizes().vec()}}, {}, {});
  file.append({static_cast<const std::byte*>(logits.const_data_ptr()), logits.nbytes()});
  file.finish();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: logits WEIGHTS TOKENS OUT\n"), 2;
  try {
    const torch::NoGradGuard no_grad;
    const auto weights = cli::open_weights(argv[1]);
    const models::GptOptions options = weights->model().value();
    weights->check(options);
    models::Gpt model(options);
    cli::load(*weights, *model);
    model->eval();
    write_logits(argv[3], model->forward(read_tokens(argv[2])).to(torch::kFloat).contiguous());
  } catch (const std::exception& e) {
    std::fprintf(stderr, "logits: %s\n", e.what());
    return 1;
  }
}
