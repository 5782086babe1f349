#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/comm/world.h"
#include "cli/run_file.h"

namespace ballast::cli {

/// One stage and placement of a run, and what a rank's memory comes to: by the formula, and measured where the engine
/// has run it.
struct Placement {
  int stage;
  OffloadDevice params, states;
  std::shared_ptr<const Ledger> planned;
  std::shared_ptr<const Ledger> measured;
};

/// Every stage with optimizer states on the device, in host memory and on NVMe; at stage 3 with parameters in host
/// memory too. Without figures.
std::vector<Placement> all_placements();
/// The placement of the run itself.
bool is_own(const RunFile& run, const Placement& placement);

/// The run with another stage and placement; its own is left as it is. Swap files come to lie in the run's nvme_path,
/// where there is none in train.folder.
RunFile placed(const RunFile& run, const Placement& placement);

/// Peaks of two windows of the longest length, without allocating anything. device: of the ranks.
std::shared_ptr<const Ledger> plan(const RunFile& run, int ranks, c10::DeviceType device);

/// The same from an engine that runs these two windows on random tokens. Collective.
std::shared_ptr<const Ledger> measure(const RunFile& run, const World& world);

/// Lines of the table of kinds and tiers.
std::vector<std::string> kind_table(const Ledger& memory);
/// Lines of the table of stages and placements; the run's own is marked, the others say what they save or cost.
std::vector<std::string> placement_table(const RunFile& run, const std::vector<Placement>& placements);

}  // namespace ballast::cli
