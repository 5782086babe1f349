#include "ballast/models/generate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>

#include "ballast/base/error.h"

namespace ballast::models {
namespace {

class EvaluationMode {  // restores the model's mode also when an operator throws
 public:
  explicit EvaluationMode(GptImpl& model) : model_(model), was_training_(model.is_training()) { model_.eval(); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() { model_.train(was_training_); }

 private:
  GptImpl& model_;
  bool was_training_;
};

/// logits: fp32 [vocabulary] on the CPU.
std::int64_t draw(at::Tensor logits, const SampleOptions& options, at::Generator& generator) {
  if (options.temperature == 0) return logits.argmax().item<std::int64_t>();
  logits = logits / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const auto [values, tokens] = logits.topk(options.top_k);
    return tokens.index_select(0, values.softmax(0).multinomial(1, false, generator)).item<std::int64_t>();
  }
  return logits.softmax(0).multinomial(1, false, generator).item<std::int64_t>();
}

}  // namespace

std::vector<std::int64_t> generate(GptImpl& model, const std::vector<std::int64_t>& prompt,
                                   const SampleOptions& options) {
  if (prompt.empty()) throw UseError("models.generate", "the prompt must hold at least one token (got 0)");
  if (options.count < 0 || !(options.temperature >= 0) || options.top_k < 0)
    throw UseError("models.generate", "must not be negative (count = ", options.count,
                   ", temperature = ", options.temperature, ", top_k = ", options.top_k, ")");
  torch::NoGradGuard no_grad;
  EvaluationMode evaluation(model);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const c10::Device device = model.token_embedding->weight.device();

  std::vector<std::int64_t> text = prompt;
  for (std::int64_t i = 0; i < options.count; ++i) {
    const auto length = std::min<std::int64_t>(static_cast<std::int64_t>(text.size()), model.options.context);
    const at::Tensor window =
        torch::tensor(std::vector<std::int64_t>(text.end() - length, text.end()), at::kLong).unsqueeze(0);
    const at::Tensor logits = model.forward(window.to(device)).select(1, length - 1).squeeze(0);
    text.push_back(draw(logits.to(at::kCPU, at::kFloat), options, generator));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

}  // namespace ballast::models
