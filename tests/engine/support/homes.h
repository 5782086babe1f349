#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "tests/engine/support/cell.h"

namespace ballast::testing {

/// A placement and what else a configuration says about it.
struct Home {
  const char* name;
  Placement placement;
  nlohmann::json zero;  // to merge into "zero_optimization"

  nlohmann::json changes() const { return {{"zero_optimization", zero}}; }
  /// Beside states off the device, sums of gradients on it.
  bool sums_stay() const { return zero.contains("offload_gradients") && zero["offload_gradients"]["device"] == "none"; }
  /// Some units' states lie on the device.
  bool on_device() const { return placement == Placement::kDevice || zero.contains("offload_optimizer"); }
};

/// The plain placements first, in their order; then those with a part elsewhere.
const std::vector<Home>& homes();

}  // namespace ballast::testing
