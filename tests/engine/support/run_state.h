#pragma once

#include <torch/nn/module.h>

#include <map>
#include <string>

#include "ballast/engine/engine.h"

namespace ballast::testing {

/// Everything of a run that must survive: full masters, moments and step counts by name, what forward sees of each
/// parameter, buffers, counters, learning rates, loss scale. On the host. compute: with what forward sees.
using RunState = std::map<std::string, at::Tensor>;
RunState state_of(Engine& engine, torch::nn::Module& module, bool compute = true);

/// Every entry of both, bit for bit.
void expect_same_state(const RunState& got, const RunState& want, const std::string& what);

}  // namespace ballast::testing
