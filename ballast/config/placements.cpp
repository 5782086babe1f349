#include "ballast/base/error.h"
#include "ballast/config/config.h"
#include "ballast/config/key.h"

/// What the keys of offload_keys.cpp mean together.
namespace ballast {

namespace {

/// One kind of state, its placement as the schema writes it.
struct Placed {
  const char* section;
  OffloadDevice device;
  const std::string& nvme_path;
};

std::vector<Placed> all_placed(const ZeroConfig& zero) {
  return {{"zero_optimization.offload_optimizer", zero.offload_optimizer.device, zero.offload_optimizer.nvme_path},
          {"zero_optimization.offload_param", zero.offload_param.device, zero.offload_param.nvme_path},
          {"zero_optimization.offload_gradients", gradient_device(zero), zero.offload_gradients.nvme_path}};
}

const char* name(OffloadDevice device) {
  switch (device) {
    case OffloadDevice::kNone:
      return "\"none\"";
    case OffloadDevice::kCpu:
      return "\"cpu\"";
    case OffloadDevice::kNvme:
      return "\"nvme\"";
  }
  return "";
}

}  // namespace

OffloadDevice gradient_device(const ZeroConfig& zero) {
  switch (zero.offload_gradients.device) {
    case GradientDevice::kAuto:
      return zero.offload_optimizer.device == OffloadDevice::kNone ? OffloadDevice::kNone : OffloadDevice::kCpu;
    case GradientDevice::kNone:
      return OffloadDevice::kNone;
    case GradientDevice::kCpu:
      return OffloadDevice::kCpu;
    case GradientDevice::kNvme:
      return OffloadDevice::kNvme;
  }
  return OffloadDevice::kNone;
}

void check_placements(const ZeroConfig& zero, const std::string& at) {
  constexpr const char* kCheck = "config.placements";
  if (zero.offload_param.device != OffloadDevice::kNone && zero.stage != 3) {
    throw ConfigError(kCheck, "contradiction (", at,
                      "zero_optimization.offload_param.device = ", name(zero.offload_param.device), ", ", at,
                      "zero_optimization.stage = ", zero.stage,
                      "; parameters are offloaded at stage 3: set the stage to 3, or the device to \"none\")");
  }
  const OffloadDevice gradients = gradient_device(zero);
  if (gradients != OffloadDevice::kNone && zero.offload_optimizer.device == OffloadDevice::kNone) {
    throw ConfigError(kCheck, "contradiction (", at, "zero_optimization.offload_gradients.device = ", name(gradients),
                      ", ", at,
                      "zero_optimization.offload_optimizer.device = \"none\"; gradients are offloaded to an update on "
                      "the host: set offload_optimizer.device to \"cpu\" or \"nvme\", or leave offload_gradients out)");
  }
  for (const Placed& placed : all_placed(zero)) {
    if (placed.device == OffloadDevice::kNvme && placed.nvme_path.empty()) {
      throw ConfigError(kCheck, "required key (", at, placed.section, ".nvme_path; ", at, placed.section,
                        ".device = \"nvme\" wants a folder on the disk that takes the swap files)");
    }
  }
}

std::vector<std::string> schema::placement_notices(const ZeroConfig& zero, const std::string& at) {
  std::vector<std::string> notices;
  for (const Placed& placed : all_placed(zero)) {
    if (placed.device != OffloadDevice::kNvme && !placed.nvme_path.empty()) {
      notices.push_back(at + placed.section + ".nvme_path has no effect: the device is " + name(placed.device));
    }
  }
  if (zero.offload_optimizer.device == OffloadDevice::kNone && zero.offload_optimizer.ratio != 1) {
    notices.push_back(at + "zero_optimization.offload_optimizer.ratio has no effect: the device is \"none\"");
  }
  return notices;
}

}  // namespace ballast
