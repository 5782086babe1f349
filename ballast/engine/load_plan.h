#pragma once

#include <string>
#include <vector>

#include "ballast/checkpoint/manifest.h"
#include "ballast/engine/checkpoint_options.h"
#include "ballast/engine/save_plan.h"
#include "ballast/layout/layout.h"

namespace ballast {

/// Which of a checkpoint's records belong to which of a module's parameters and buffers: by any of their names, where
/// the shapes agree. Points into the manifest.
struct LoadPlan {
  std::vector<const ckpt::ParameterRecord*> parameters;  // by parameter; null: nothing to load
  std::vector<const ckpt::BufferRecord*> buffers;        // by buffer, in the order given
};

/// The record has all states of an optimizer that keeps these. Else the parameter starts afresh: what another optimizer
/// kept, or an engine had before the load, would stand beside a step count that isn't its own.
bool has_states(const ckpt::ParameterRecord& record, const std::vector<std::string>& keys);

/// Fills in the report's lists of names, sorted.
LoadPlan match(const Layout& layout, const NamedTensors& buffers, const ckpt::Manifest& manifest, LoadReport& report);

/// Throws UseError with all names where there are any.
void refuse_misfit(const LoadReport& report, const std::string& where);

}  // namespace ballast
