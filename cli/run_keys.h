#pragma once

#include <string>
#include <vector>

#include "ballast/config/key.h"
#include "cli/run_file.h"

namespace ballast::cli {

/// The command line's own keys, on the mechanism of the engine's schema (ballast/config/key.h). One table drives
/// reading, errors, to_json, docs/train.md and the tests.
const std::vector<schema::Key<RunFile>>& run_keys();

/// "model", "data", "train", "save", "sample".
const std::vector<std::string>& own_sections();

/// Every path that a run file may hold, those of the engine's section included: what an unknown key is compared with.
const std::vector<std::string>& known_run_paths();

}  // namespace ballast::cli
