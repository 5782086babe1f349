#include "tests/engine/support/cell.h"

#include <c10/core/ScalarType.h>

#include "tests/engine/support/swap_folder.h"

namespace ballast::testing {

const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kBFloat16 ? "bf16" : "fp16";
}

c10::ScalarType scalar_of(DType dtype) {
  return dtype == DType::kFloat32 ? c10::kFloat : dtype == DType::kBFloat16 ? c10::kBFloat16 : c10::kHalf;
}

const char* name_of(Placement placement) {
  switch (placement) {
    case Placement::kDevice:
      return "device";
    case Placement::kHost:
      return "host";
    case Placement::kNvme:
      return "nvme";
    case Placement::kAllHost:
      return "allhost";
    case Placement::kAllNvme:
      return "allnvme";
  }
  return "";
}

std::string name_of(const Cell& cell) {
  return "stage" + std::to_string(cell.stage) + "_" + name_of(cell.placement) + "_" + name_of(cell.dtype) +
         (cell.managed ? "_managed" : "_callerowned");
}

std::vector<Cell> cells(const std::vector<int>& stages, const std::vector<DType>& dtypes,
                        const std::vector<bool>& managed, const std::vector<Placement>& placements) {
  std::vector<Cell> all;
  for (int stage : stages)
    for (Placement placement : placements) {
      if (placement == Placement::kAllHost && stage != 3) continue;
      for (DType dtype : dtypes)
        for (bool is_managed : managed) all.push_back({stage, placement, dtype, is_managed});
    }
  return all;
}

nlohmann::json settings(const Cell& cell, int accumulation_steps, const nlohmann::json& changes) {
  nlohmann::json json = {
      {"train_micro_batch_size_per_gpu", 1},
      {"gradient_accumulation_steps", accumulation_steps},
      {"managed_gradient_accumulation", cell.managed},
      {"steps_per_print", 0},
      {"optimizer", {{"type", "Adam"}, {"params", {{"lr", 0.1}, {"betas", {0.9, 0.999}}, {"eps", 1.0}}}}},
      {"zero_optimization", {{"stage", cell.stage}, {"stage3_param_persistence_threshold", 0}}},
  };
  nlohmann::json& zero = json["zero_optimization"];
  if (cell.off_device() && !cell.on_disk()) zero["offload_optimizer"] = {{"device", "cpu"}};
  if (cell.placement == Placement::kAllHost && cell.stage == 3) zero["offload_param"] = {{"device", "cpu"}};
  const nlohmann::json on_disk = {{"device", "nvme"}, {"nvme_path", swap_folder().string()}};
  if (cell.on_disk()) {
    zero["offload_optimizer"] = on_disk;
    zero["offload_optimizer"]["buffer_count"] = 2 + cell.stage % 2;
    zero["sub_group_size"] = cell.dtype == DType::kFloat32 ? 64 : 128;
  }
  if (cell.placement == Placement::kAllNvme) {
    zero["offload_gradients"] = on_disk;
    if (cell.stage == 3) zero["offload_param"] = on_disk;
    if (cell.stage == 3)
      zero["offload_param"].update({{"buffer_count", cell.managed ? 2 : 4}, {"max_in_cpu", cell.managed ? 0 : 200}});
  }
  if (cell.dtype == DType::kBFloat16) json["bf16"] = {{"enabled", true}};
  if (cell.dtype == DType::kFloat16) json["fp16"] = {{"enabled", true}, {"initial_scale_power", 10}};
  json.merge_patch(changes);
  return json;
}

}  // namespace ballast::testing
