#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "ballast/base/ledger.h"
#include "ballast/tiers/swap_ring.h"

namespace ballast {

/// How a stage and a configuration treat gradients: everything in which they differ here.
struct GradPolicy {
  bool reduce_every_backward = false;        // stages 2-3; stages 0-1 reduce when the window ends
  bool keep_whole_sum = false;               // stage 0: every rank keeps the whole sum, else its shard of it
  bool equal_calls = false;                  // stage 3: ranks must run the same backwards, since gathers are collective
  bool overlap = true;                       // launch a unit's reduction as soon as its gradients are complete
  std::int64_t max_in_flight = 0;            // elements being reduced at once; one unit may exceed it
  c10::ScalarType accumulate = c10::kFloat;  // where more than one contribution is added up
  Tier tier = Tier::kDevice;                 // where sums rest of units whose update runs on the host
  tiers::SwapOptions swap{};                 // of Tier::kNvme
  std::optional<c10::ScalarType> communicate;  // across ranks; unset: the unit's compute dtype
};

}  // namespace ballast
