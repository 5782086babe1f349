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

// From the one that costs least speed to the one that costs most. Onto the disk each kind takes those before it along:
// states travel once a window, sums in every backward, parameters in every forward and backward.
std::vector<Change> changes_of(const Config& config) {
  std::vector<Change> changes;
  const OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  for (double ratio : {0.75, 0.5, 0.25}) {
    if (optimizer.device == OffloadDevice::kNone || ratio >= optimizer.ratio) continue;
    Change change{"zero_optimization.offload_optimizer.ratio = " + std::to_string(ratio).substr(0, 4), config};
    change.config.zero.offload_optimizer.ratio = ratio;
    changes.push_back(std::move(change));
  }
  constexpr const char* kFolder = "/";  // only planned with
  Change onto_disk{"\"nvme\" as device of zero_optimization.", config};
  ZeroConfig& zero = onto_disk.config.zero;
  const auto moves = [&](const char* section) {
    const bool first = onto_disk.text.back() == '.';
    onto_disk.text += (first ? "" : " and ") + std::string(section);
    changes.push_back(onto_disk);
  };
  if (optimizer.device == OffloadDevice::kCpu) {
    zero.offload_optimizer.device = OffloadDevice::kNvme;
    zero.offload_optimizer.nvme_path = kFolder;
    moves("offload_optimizer");
  }
  if (gradient_device(zero) == OffloadDevice::kCpu) {
    zero.offload_gradients = {GradientDevice::kNvme, kFolder};
    moves("offload_gradients");
  }
  if (zero.offload_param.device == OffloadDevice::kCpu) {
    zero.offload_param.device = OffloadDevice::kNvme;
    zero.offload_param.nvme_path = kFolder;
    zero.offload_param.max_in_cpu = 0;
    moves("offload_param");
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
