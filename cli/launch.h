#pragma once

#include "ballast/comm/world.h"
#include "cli/run_file.h"

namespace ballast::cli {

/// The ranks that a launcher started, on the device and with the patience that the run asks for. Collective.
World make_world(const RunFile& run);

struct Launched {
  int rank = 0, ranks = 1;
};
/// What the launcher's variables say, without meeting the other ranks.
Launched launched();

}  // namespace ballast::cli
