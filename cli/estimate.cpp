#include "cli/estimate.h"

#include <ATen/Context.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>

#include "ballast/base/bytes.h"
#include "ballast/engine/engine.h"
#include "ballast/engine/memory_plan.h"
#include "ballast/engine/module_walk.h"
#include "ballast/models/gpt.h"
#include "ballast/models/skeleton.h"
#include "cli/commands.h"
#include "cli/launch.h"
#include "cli/text.h"

namespace ballast::cli {
namespace {

constexpr int kWindows = 2;  // the second finds the first one's states and order of units

std::int64_t longest_window(const RunFile& run, int ranks) {
  return run.engine.managed_gradient_accumulation ? resolve_batch(run.engine, ranks).accumulation_steps
                                                  : run.train.window_max;
}

std::string padded(const std::string& text, std::size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

std::string amount(std::int64_t bytes) { return bytes == 0 ? "-" : format_bytes(bytes); }

std::string row(const std::vector<std::string>& cells) {
  constexpr std::size_t kWidth = 13;
  std::string line;
  for (const std::string& cell : cells) line += padded(cell, kWidth);
  return line.substr(0, line.find_last_not_of(' ') + 1);
}

std::int64_t peak(const Ledger& memory, Tier tier) { return memory.total(tier).peak; }

/// "-1.20 MiB device, +3.00 MiB host" against the run's own placement.
std::string difference(const Ledger& memory, const Ledger& own) {
  std::string text;
  for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
    const std::int64_t bytes = peak(memory, tier) - peak(own, tier);
    if (bytes == 0) continue;
    text += (text.empty() ? "" : ", ") + std::string(bytes < 0 ? "saves " : "costs ") +
            format_bytes(bytes < 0 ? -bytes : bytes) + " " + kTierNames[static_cast<std::size_t>(tier)];
  }
  return text.empty() ? "the same" : text;
}

c10::DeviceType device_type(const RunFile& run) {
  const bool cuda =
      run.train.device.rfind("cuda", 0) == 0 || (run.train.device == "auto" && at::hasCUDA() && at::getNumGPUs() > 0);
  return cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

}  // namespace

std::vector<Placement> all_placements() {
  std::vector<Placement> all;
  for (int stage = 0; stage <= 3; ++stage)
    for (const OffloadDevice params : {OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme})
      for (const OffloadDevice states : {OffloadDevice::kNone, OffloadDevice::kCpu, OffloadDevice::kNvme})
        if (params == OffloadDevice::kNone || stage == 3) all.push_back({stage, params, states, nullptr, nullptr});
  return all;
}

bool is_own(const RunFile& run, const Placement& placement) {
  const ZeroConfig& zero = run.engine.zero;
  return placement.stage == zero.stage && placement.params == zero.offload_param.device &&
         placement.states == zero.offload_optimizer.device;
}

RunFile placed(const RunFile& run, const Placement& placement) {
  RunFile other = run;
  ZeroConfig& zero = other.engine.zero;
  zero.stage = placement.stage;
  zero.offload_param.device = placement.params;
  zero.offload_optimizer.device = placement.states;
  if (zero.offload_optimizer.nvme_path.empty()) zero.offload_optimizer.nvme_path = run.train.folder;
  if (placement.params == OffloadDevice::kNvme && run.engine.zero.offload_param.device != OffloadDevice::kNvme) {
    if (zero.offload_param.nvme_path.empty()) zero.offload_param.nvme_path = run.train.folder;
    zero.offload_param.max_in_cpu = 0;  // small models would stay in host memory
  }
  // Sums lie on the host only beside states that are not on the device.
  if (placement.states == OffloadDevice::kNone && gradient_device(zero) != OffloadDevice::kNone)
    zero.offload_gradients.device = GradientDevice::kAuto;
  return other;
}

std::shared_ptr<const Ledger> plan(const RunFile& run, int ranks, c10::DeviceType device) {
  const auto module = models::skeleton(run.model);
  const Layout layout = make_layout(walk(*module, run.engine).parameters, ranks);
  return plan_memory(layout, run.engine, {.world = ranks, .device = device, .backwards = longest_window(run, ranks)});
}

std::shared_ptr<const Ledger> measure(const RunFile& run, const World& world) {
  models::Gpt model(run.model);
  Config quiet = run.engine;
  quiet.steps_per_print = 0;  // the table is all that these steps are for
  Engine engine(model.ptr(), quiet, world);
  const BatchShape shape = resolve_batch(run.engine, world.size());
  const at::Tensor tokens = torch::randint(run.model.vocabulary, {shape.micro_batch, run.model.context + 1},
                                           at::TensorOptions(at::kLong).device(world.device()));
  const at::Tensor inputs = tokens.slice(1, 0, -1), targets = tokens.slice(1, 1);
  for (int window = 0; window < kWindows; ++window) {
    for (std::int64_t k = 0; k < longest_window(run, world.size()); ++k) {
      engine.backward(model->loss(inputs, targets));
      if (run.engine.managed_gradient_accumulation) engine.step();
    }
    if (!run.engine.managed_gradient_accumulation) engine.step();
  }
  engine.synchronize();
  auto peaks = Ledger::create();  // the engine's own ends with the engine: keep what it saw
  for (std::size_t tier = 0; tier < kTierNames.size(); ++tier)
    static_cast<void>(peaks->track(MemoryKind::kParams, static_cast<Tier>(tier),
                                   engine.memory().total(static_cast<Tier>(tier)).peak));
  return peaks;
}

std::vector<std::string> kind_table(const Ledger& memory) {
  std::vector<std::string> lines{row({"", "device", "host", "nvme"})};
  for (std::size_t kind = 0; kind < kMemoryKindNames.size(); ++kind) {
    std::vector<std::string> cells{kMemoryKindNames[kind]};
    for (std::size_t tier = 0; tier < kTierNames.size(); ++tier)
      cells.push_back(amount(memory.cell(static_cast<MemoryKind>(kind), static_cast<Tier>(tier)).peak));
    lines.push_back(row(cells));
  }
  lines.push_back(row({"together", amount(peak(memory, Tier::kDevice)), amount(peak(memory, Tier::kHost)),
                       amount(peak(memory, Tier::kNvme))}));
  return lines;
}

std::vector<std::string> placement_table(const RunFile& run, const std::vector<Placement>& placements) {
  const auto own =
      std::find_if(placements.begin(), placements.end(), [&](const Placement& p) { return is_own(run, p); });
  const bool measured = !placements.empty() && placements.front().measured != nullptr;
  constexpr std::array<const char*, 3> kPlaces{"device", "host", "nvme"};  // in the order of OffloadDevice
  const auto place = [&](OffloadDevice device) { return kPlaces.at(static_cast<std::size_t>(device)); };
  const auto add_peaks = [](std::vector<std::string>& cells, const Ledger& memory) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) cells.push_back(amount(peak(memory, tier)));
  };
  std::vector<std::string> header{"stage", "params on", "states on", "device", "host", "nvme"};
  std::vector<std::string> lines;
  if (measured) {
    header.insert(header.end(), {"device", "host", "nvme"});
    lines.push_back(row({"", "", "", "measured", "measured", "measured", "formula", "formula", "formula"}));
  }
  lines.push_back(row(header));
  for (const Placement& p : placements) {
    std::vector<std::string> cells{std::to_string(p.stage), place(p.params), place(p.states)};
    if (measured) add_peaks(cells, *p.measured);
    add_peaks(cells, *p.planned);
    cells.push_back(is_own(run, p) ? "this run" : own == placements.end() ? "" : difference(*p.planned, *own->planned));
    lines.push_back(row(cells));
  }
  return lines;
}

int estimate(const RunFile& run, int ranks, bool with_engine) {
  std::optional<World> world;
  if (with_engine) world = make_world(run);
  if (world || ranks == 0) ranks = launched().ranks;
  const c10::DeviceType device = world ? world->device().type() : device_type(run);

  std::vector<Placement> placements = all_placements();
  if (world) std::filesystem::create_directories(run.train.folder);
  for (Placement& placement : placements) {
    const RunFile other = placed(run, placement);
    placement.planned = plan(other, ranks, device);
    if (world) placement.measured = measure(other, *world);
  }
  if (launched().rank != 0) return 0;

  std::int64_t parameters = 0;
  for (const auto& shape : models::parameter_shapes(run.model)) {
    std::int64_t numel = 1;
    for (const std::int64_t size : shape.sizes) numel *= size;
    parameters += numel;
  }
  std::printf("%s\n\nmemory of a rank of %d at its peak, activations not counted (formula):\n",
              describe_model(run, parameters).c_str(), ranks);
  for (const std::string& line : kind_table(*plan(run, ranks, device))) std::printf("  %s\n", line.c_str());
  std::printf("\nwith another stage or placement:\n");
  for (const std::string& line : placement_table(run, placements)) std::printf("  %s\n", line.c_str());
  return 0;
}

}  // namespace ballast::cli
