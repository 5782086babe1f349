#include "ballast/engine/host_budget.h"

#include <optional>
#include <string>
#include <vector>

#include "ballast/base/bytes.h"
#include "ballast/tiers/host_memory.h"

namespace ballast {
namespace {

struct Change {
  std::string text;
  Config config;
};

// From the one that costs least speed to the one that costs most.
std::vector<Change> changes_of(const Config& config) {
  std::vector<Change> changes;
  const OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (optimizer.device == OffloadDevice::kNone) return changes;
  for (double ratio : {0.75, 0.5, 0.25}) {
    if (ratio >= optimizer.ratio) continue;
    Change change{"zero_optimization.offload_optimizer.ratio = " + std::to_string(ratio).substr(0, 4), config};
    change.config.zero.offload_optimizer.ratio = ratio;
    changes.push_back(std::move(change));
  }
  if (optimizer.device == OffloadDevice::kCpu) {
    Change change{"zero_optimization.offload_optimizer.device = \"nvme\"", config};
    change.config.zero.offload_optimizer.device = OffloadDevice::kNvme;
    change.config.zero.offload_optimizer.nvme_path = "/";  // only planned with
    changes.push_back(std::move(change));
  }
  return changes;
}

}  // namespace

void check_host_budget(const Layout& layout, const Config& config, const MemoryPlanOptions& options, int ranks,
                       std::int64_t available) {
  const auto plan = plan_memory(layout, config, options);
  std::vector<tiers::MemoryNeed> needs;
  for (std::size_t kind = 0; kind < kMemoryKindNames.size(); ++kind) {
    const std::int64_t bytes = ranks * plan->cell(static_cast<MemoryKind>(kind), Tier::kHost).peak;
    if (bytes > 0) needs.push_back({kMemoryKindNames[kind], bytes});
  }
  if (ranks * plan->total(Tier::kHost).peak <= available) return;
  std::string remedy = "use more machines, or a smaller model";
  for (const Change& change : changes_of(config)) {
    const std::int64_t bytes = ranks * plan_memory(layout, change.config, options)->total(Tier::kHost).peak;
    if (bytes > available) continue;
    remedy = change.text + " fits, with " + format_bytes(bytes);
    break;
  }
  if (ranks > 1) remedy = std::to_string(ranks) + " ranks on this machine; " + remedy;
  tiers::require_host_memory(needs, available, remedy);
}

}  // namespace ballast
