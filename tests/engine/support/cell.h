#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ballast/config/config.h"

namespace ballast::testing {

/// One combination of what a configuration can ask of the engine. What a test says must hold in all of them.
struct Cell {
  int stage = 0;
  bool host = false;  // masters, moments and gradient shards in host memory
  DType dtype = DType::kFloat32;
  bool managed = true;
};

const char* name_of(DType dtype);
c10::ScalarType scalar_of(DType dtype);
std::string name_of(const Cell& cell);  // "stage2_host_bf16_managed"

/// All combinations.
std::vector<Cell> cells(const std::vector<int>& stages, const std::vector<DType>& dtypes,
                        const std::vector<bool>& managed, const std::vector<bool>& hosts = {false, true});

/// A configuration for the cell, `changes` merged over it (JSON merge patch). Adam with lr 0.1, betas 0.9/0.999, eps 1
/// and no decay: its first update is -0.1*g/(|g|+1), so that a gradient of the wrong size shows, which the usual eps
/// hides. fp16 starts at scale 1024. Stage 3 shards every parameter, however small.
nlohmann::json settings(const Cell& cell, int accumulation_steps = 1,
                        const nlohmann::json& changes = nlohmann::json::object());

}  // namespace ballast::testing
