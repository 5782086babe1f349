#pragma once

#include "ballast/config/config.h"
#include "ballast/grads/host_sums.h"
#include "ballast/grads/policy.h"
#include "ballast/optim/optimizer_states.h"
#include "ballast/params/param_store.h"

namespace ballast {

/// What a stage and a placement mean, all of it: every difference between stages 0-3 and between placements is one of
/// these values, and the code that reads them is one path.
struct Policies {
  ParamPolicy params;
  GradPolicy grads;
  OptimizerPolicy optimizer;
};

Policies make_policies(const Config& config, int world);

/// How sums off the device are kept, but for names and ranks.
HostSums::Options host_sums_options(const Policies& policies);

}  // namespace ballast
