#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ballast/config/config.h"
#include "ballast/layout/layout.h"

namespace torch::nn {
class Module;
}

namespace ballast {

/// A module's parameters as the layout wants them, and its tensors.
struct WalkedModule {
  std::vector<ParameterInfo> parameters;
  /// By parameter: its tensor, then others that a module holds beside it and that are views of the same memory.
  std::vector<std::vector<at::Tensor>> tensors;
  std::vector<at::Tensor> buffers;  // of any type; never sharded
};

/// Types of parameters that the engine shards and trains.
bool is_sharded_type(c10::ScalarType type);

/// Lists each parameter once, with all its names, in order of registration, and says which unit it belongs to: each
/// element of a ModuleList or Sequential is a unit (the outermost counts), a declared leaf module is one wherever it
/// stands, and what is left forms one unit a module. Tensors that are the same view of one storage count as one tied
/// parameter, as if the module had registered one tensor twice. Frozen parameters of other types
/// (integers) count as buffers. Throws ConfigError for
/// leaf modules or group patterns that match nothing, UseError for a trainable parameter of a type that can't be
/// trained and for two parameters that share memory in any other way.
WalkedModule walk(const torch::nn::Module& module, const Config& config);

}  // namespace ballast
