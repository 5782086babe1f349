#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::testing {

/// Where optimizer states lie, a window's sums of gradients, and parameters.
enum class Placement {
  kDevice,   // all on the device
  kHost,     // states and sums in host memory
  kNvme,     // states in a swap file, sums in host memory
  kAllHost,  // stage 3 only: states, sums and parameters in host memory
  kAllNvme,  // states, sums and, at stage 3, parameters in swap files
};
inline const std::vector<Placement> kEveryPlacement{Placement::kDevice, Placement::kHost, Placement::kNvme,
                                                    Placement::kAllHost, Placement::kAllNvme};

/// One combination of what a configuration can ask of the engine. What a test says must hold in all of them.
struct Cell {
  int stage = 0;
  Placement placement = Placement::kDevice;
  DType dtype = DType::kFloat32;
  bool managed = true;

  /// Updates run in the host's memory, on a thread of their own behind step(); sums of gradients rest there.
  bool off_device() const { return placement != Placement::kDevice; }
  bool on_disk() const { return placement == Placement::kNvme || placement == Placement::kAllNvme; }
};

const char* name_of(DType dtype);
const char* name_of(Placement placement);
c10::ScalarType scalar_of(DType dtype);
std::string name_of(const Cell& cell);  // "stage2_host_bf16_managed"

/// All combinations that there are.
std::vector<Cell> cells(const std::vector<int>& stages, const std::vector<DType>& dtypes,
                        const std::vector<bool>& managed, const std::vector<Placement>& placements = kEveryPlacement);

/// A configuration for the cell, `changes` merged over it (JSON merge patch). Adam with lr 0.1, betas 0.9/0.999, eps 1
/// and no decay: its first update is -0.1*g/(|g|+1), so that a gradient of the wrong size shows, which the usual eps
/// hides. fp16 starts at scale 1024. Stage 3 shards every parameter, however small. On NVMe chunks are as small as they
/// can be (64 or 128 elements) and the rings as short (2 or 3 buffers), so that they turn many times in a small update.
nlohmann::json settings(const Cell& cell, int accumulation_steps = 1,
                        const nlohmann::json& changes = nlohmann::json::object());

}  // namespace ballast::testing
