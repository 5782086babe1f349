#pragma once

#include "ballast/models/gpt_options.h"

namespace ballast::models {

inline GptOptions small() { return {.vocabulary = 11, .context = 8, .layers = 2, .width = 12, .heads = 3, .seed = 5}; }

/// Two heads of queries share one of keys, and no two sizes are alike.
inline GptOptions small_llama() {
  return {.vocabulary = 11,
          .context = 8,
          .layers = 2,
          .width = 24,
          .heads = 4,
          .key_heads = 2,
          .norm = NormKind::kRms,
          .norm_eps = 1e-3,
          .positions = PositionKind::kRotary,
          .rope_theta = 50,
          .mlp = MlpKind::kSwiglu,
          .mlp_width = 20,
          .bias = false,
          .tied_head = false,
          .seed = 5};
}

}  // namespace ballast::models
