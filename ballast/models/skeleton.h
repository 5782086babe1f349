#pragma once

#include <memory>

#include "ballast/models/gpt_options.h"

namespace torch::nn {
class Module;
}

namespace ballast::models {

/// The module tree of a Gpt with these options, its parameters on the meta device: names, shapes and units are those of
/// the model, and nothing is allocated. It can't compute. For planning. Throws ConfigError as a Gpt would.
std::shared_ptr<torch::nn::Module> skeleton(const GptOptions& options);

}  // namespace ballast::models
