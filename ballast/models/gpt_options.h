#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::models {

/// Shape and initialisation of a GPT-2. Defaults: the 124 M model, on bytes.
struct GptOptions {
  std::int64_t vocabulary = 256;
  std::int64_t context = 1024;  // longest sequence
  std::int64_t layers = 12;
  std::int64_t width = 768;  // a multiple of heads
  std::int64_t heads = 12;
  double dropout = 0;     // on embeddings, attention weights and residuals; in [0, 1)
  bool tied_head = true;  // the output head is the token embedding
  std::uint64_t seed = 0;
};

/// Throws ConfigError that names the option, its value and what is allowed.
void check(const GptOptions& options);

struct ParameterShape {
  std::string name;  // dotted, as in named_parameters()
  std::vector<std::int64_t> sizes;
};

/// What named_parameters() of a Gpt with these options lists, in its order, without allocating a model.
std::vector<ParameterShape> parameter_shapes(const GptOptions& options);

}  // namespace ballast::models
