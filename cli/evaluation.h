#pragma once

#include <cstdint>

#include "ballast/comm/agreement.h"
#include "ballast/comm/world.h"
#include "ballast/data/windows.h"
#include "ballast/models/gpt.h"

namespace ballast::cli {

struct Evaluation {
  double nats = 0;  // mean cross-entropy a token
  std::int64_t tokens = 0;
};

/// Mean loss over `limit` held-out windows at most, chosen evenly, `batch` of them at a time on each rank. Every window
/// counts once and every token alike, however the windows fall on the ranks; all ranks get the same result. Collective,
/// and every rank runs the same number of forwards (at stage 3 their gathers are collective).
Evaluation evaluate(models::GptImpl& model, const data::Windows& windows, std::int64_t limit, std::int64_t batch,
                    const World& world, Agreement& agreement);

}  // namespace ballast::cli
