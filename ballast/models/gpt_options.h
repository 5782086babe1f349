#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::models {

enum class NormKind : std::uint8_t { kLayer, kRms };
enum class PositionKind : std::uint8_t { kLearned, kRotary };
enum class MlpKind : std::uint8_t { kGelu, kSwiglu };

/// Shape and initialisation of a decoder. Defaults: the 124 M GPT-2, on bytes. A Llama is {.norm = kRms, .positions =
/// kRotary, .mlp = kSwiglu, .bias = false, .tied_head = false} with its sizes.
struct GptOptions {
  std::int64_t vocabulary = 256;
  std::int64_t context = 1024;  // longest sequence
  std::int64_t layers = 12;
  std::int64_t width = 768;  // a multiple of heads
  std::int64_t heads = 12;
  std::int64_t key_heads = 0;  // heads of keys and values, each for as many of `heads`; 0: as many as those
  NormKind norm = NormKind::kLayer;
  double norm_eps = 1e-5;
  PositionKind positions = PositionKind::kLearned;
  double rope_theta = 10000;  // of rotary positions
  MlpKind mlp = MlpKind::kGelu;
  std::int64_t mlp_width = 0;  // 0: 4 width, gated 8/3 width in whole 64s
  bool bias = true;            // of linear layers and layer norms
  double dropout = 0;          // on embeddings, attention weights and residuals; in [0, 1)
  bool tied_head = true;       // the output head is the token embedding
  std::uint64_t seed = 0;

  std::int64_t head_width() const { return width / heads; }
  /// Of keys, and of values.
  std::int64_t key_width() const { return head_width() * (key_heads == 0 ? heads : key_heads); }
  /// Of the layer between the two of the MLP; a gated one computes two of that width.
  std::int64_t hidden_width() const;
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
