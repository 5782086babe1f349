#include "cli/text.h"

#include <algorithm>
#include <array>

#include "ballast/base/bytes.h"
#include "cli/print.h"
#include "cli/status.h"

namespace ballast::cli {
namespace {

std::string place_of(OffloadDevice device, const std::string& nvme_path) {
  switch (device) {
    case OffloadDevice::kNone:
      return "on the device";
    case OffloadDevice::kCpu:
      return "in host memory";
    case OffloadDevice::kNvme:
      return "on disk (" + nvme_path + ")";
  }
  return "";
}

std::string describe_windows(const RunFile& run, int world) {
  const BatchShape shape = resolve_batch(run.engine, world);
  std::string length;
  if (run.engine.managed_gradient_accumulation) {
    length = "managed windows of " + std::to_string(shape.accumulation_steps);
  } else if (run.train.window_min == run.train.window_max) {
    length = "caller-owned windows of " + std::to_string(run.train.window_min);
  } else {
    length = "caller-owned windows of " + std::to_string(run.train.window_min) + " to " +
             std::to_string(run.train.window_max);
  }
  return length + (length.ends_with(" 1") ? " backward" : " backwards") + ", each on " +
         std::to_string(shape.micro_batch) + " x " + std::to_string(run.model.context) + " a rank";
}

/// Bytes of the character that begins there; 0: it is a control character, or no UTF-8 (RFC 3629: no overlong forms, no
/// surrogates, nothing beyond U+10FFFF).
std::size_t character_at(const std::string& text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const unsigned first = byte(at);
  if (first < 0x80) return (first >= 0x20 && first != 0x7f) || first == '\n' || first == '\t' ? 1 : 0;
  const std::size_t length = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  const unsigned second = byte(at + 1);
  const bool out_of_range = (first == 0xc2 && second < 0xa0) ||  // the other control characters
                            (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                            (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
  return out_of_range ? 0 : length;
}

}  // namespace

std::string describe_model(const RunFile& run, std::int64_t parameters) {
  const char* precision = run.engine.bf16 ? "bf16" : run.engine.fp16.enabled ? "fp16" : "fp32";
  const bool llama = run.model.norm == models::NormKind::kRms && run.model.positions == models::PositionKind::kRotary &&
                     run.model.mlp == models::MlpKind::kSwiglu;
  return std::string("model: ") + (llama ? "Llama" : "GPT") + " of " + std::to_string(run.model.layers) +
         (run.model.layers == 1 ? " layer, width " : " layers, width ") + std::to_string(run.model.width) + ", " +
         format_count(static_cast<double>(parameters)) + " parameters in " + precision;
}

std::string describe_engine(const RunFile& run, const World& world) {
  const ZeroConfig& zero = run.engine.zero;
  const std::string params =
      zero.offload_param.device == OffloadDevice::kNone
          ? ""
          : "parameters " + place_of(zero.offload_param.device, zero.offload_param.nvme_path) + ", ";
  return "engine: " + std::to_string(world.size()) + (world.size() == 1 ? " rank on " : " ranks on ") +
         world.device().str() + ", stage " + std::to_string(zero.stage) + ", " + params + "optimizer states " +
         place_of(zero.offload_optimizer.device, zero.offload_optimizer.nvme_path) + "; " +
         describe_windows(run, world.size());
}

std::string describe_text(const data::Windows& windows, const std::string& unit, double entropy) {
  const data::Corpus& corpus = windows.corpus();
  return "text: " + std::to_string(corpus.files()) + (corpus.files() == 1 ? " file, " : " files, ") +
         format_count(static_cast<double>(corpus.size())) + " " + unit + "s, " +
         print("order-0 entropy %.2f bits a ", entropy) + unit + "; " +
         format_count(static_cast<double>(windows.count(data::Part::kTrain))) + " windows of " +
         std::to_string(windows.length()) + " to train on, " +
         format_count(static_cast<double>(windows.count(data::Part::kHeldOut))) + " held out";
}

std::vector<std::string> describe_memory(const Ledger& memory) {
  std::vector<std::string> lines;
  for (std::size_t tier = 0; tier < kTierNames.size(); ++tier) {
    const auto total = memory.total(static_cast<Tier>(tier));
    if (total.peak == 0) continue;
    std::string kinds;
    for (std::size_t kind = 0; kind < kMemoryKindNames.size(); ++kind) {
      const auto cell = memory.cell(static_cast<MemoryKind>(kind), static_cast<Tier>(tier));
      if (cell.peak > 0)
        kinds += std::string(kinds.empty() ? "" : ", ") + kMemoryKindNames[kind] + " " + format_bytes(cell.peak);
    }
    lines.push_back(std::string("memory of rank 0, ") + kTierNames[tier] + ": peak " + format_bytes(total.peak) + " (" +
                    kinds + ")");
  }
  return lines;
}

std::string printable(const std::string& text) {
  std::string shown;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = character_at(text, at);
    if (length == 0) shown += print("\\x%02x", static_cast<unsigned char>(text[at]));
    shown.append(text, at, length);
    at += std::max<std::size_t>(length, 1);
  }
  return shown;
}

}  // namespace ballast::cli
