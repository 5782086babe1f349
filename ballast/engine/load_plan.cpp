#include "ballast/engine/load_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "ballast/base/error.h"

namespace ballast {
namespace {

std::string join(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 20;  // of a model with another prefix everything is missing
  std::ostringstream text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) text << (i == 0 ? "" : ", ") << names[i];
  if (names.size() > kMost) text << " and " << names.size() - kMost << " more";
  return text.str();
}

}  // namespace

LoadPlan match(const Layout& layout, const NamedTensors& buffers, const ckpt::Manifest& manifest, LoadReport& report) {
  std::map<std::string, const ckpt::ParameterRecord*> parameters;
  for (const ckpt::ParameterRecord& record : manifest.parameters)
    for (const std::string& name : record.names) parameters[name] = &record;
  std::map<std::string, const ckpt::BufferRecord*> known_buffers;
  for (const ckpt::BufferRecord& record : manifest.buffers) known_buffers[record.name] = &record;

  LoadPlan plan;
  std::set<const void*> used;
  for (const ParameterInfo& info : layout.parameters) {
    const ckpt::ParameterRecord* record = nullptr;
    for (const std::string& name : info.names)
      if (const auto found = parameters.find(name); found != parameters.end() && record == nullptr)
        record = found->second;
    if (record != nullptr) used.insert(record);
    if (record == nullptr) {
      report.missing.push_back(info.name());
    } else if (record->shape != info.shape) {
      report.misshaped.push_back(info.name());
      record = nullptr;
    }
    plan.parameters.push_back(record);
  }
  for (const auto& [name, value] : buffers) {
    const auto found = known_buffers.find(name);
    const ckpt::BufferRecord* record = found == known_buffers.end() ? nullptr : found->second;
    if (record != nullptr) used.insert(record);
    if (record == nullptr) {
      report.missing.push_back(name);
    } else if (at::IntArrayRef(record->shape) != value.sizes()) {
      report.misshaped.push_back(name);
      record = nullptr;
    }
    plan.buffers.push_back(record);
  }
  for (const ckpt::ParameterRecord& record : manifest.parameters)
    if (!used.contains(&record)) report.unexpected.push_back(record.names.front());
  for (const ckpt::BufferRecord& record : manifest.buffers)
    if (!used.contains(&record)) report.unexpected.push_back(record.name);
  for (auto* names : {&report.missing, &report.unexpected, &report.misshaped}) std::sort(names->begin(), names->end());
  return plan;
}

bool has_states(const ckpt::ParameterRecord& record, const std::vector<std::string>& keys) {
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return record.states.contains(key); });
}

void refuse_misfit(const LoadReport& report, const std::string& where) {
  std::string what;
  const auto add = [&what](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) what.append(what.empty() ? "" : "; ").append(title).append(join(names));
  };
  add("it lacks ", report.missing);
  add("the module has no ", report.unexpected);
  add("of other shapes are ", report.misshaped);
  if (!what.empty())
    throw UseError("engine.load_checkpoint", "the checkpoint is of another model (", where, "; ", what,
                   "; LoadOptions::strict = false loads what fits)");
}

}  // namespace ballast
