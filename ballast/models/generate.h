#pragma once

#include <cstdint>
#include <vector>

#include "ballast/models/gpt.h"

namespace ballast::models {

struct SampleOptions {
  std::int64_t count = 256;  // tokens to draw
  double temperature = 1;    // logits are divided by it; 0: always the likeliest token
  std::int64_t top_k = 0;    // only the k likeliest tokens can be drawn; 0: all of them
  std::uint64_t seed = 0;
};

/// Draws tokens one by one, each from the model's distribution after the last `context` tokens. Returns the drawn
/// tokens without the prompt. Leaves the model's training mode as it was; builds no graph. A rank of a sharded model
/// runs one forward for each token, so all ranks must call this with the same prompt and options. Throws UseError on an
/// empty prompt, a negative count, temperature or top_k.
std::vector<std::int64_t> generate(GptImpl& model, const std::vector<std::int64_t>& prompt,
                                   const SampleOptions& options);

}  // namespace ballast::models
