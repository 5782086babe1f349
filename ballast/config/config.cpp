#include "ballast/config/config.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "ballast/base/error.h"
#include "ballast/config/json_text.h"
#include "ballast/config/key.h"
#include "ballast/config/value.h"

namespace ballast {

namespace {

using nlohmann::json;
using namespace schema;

constexpr const char* kParse = "config.parse";

struct Given {
  std::string path;  // as written, in the whole file
  const json* value;
};
using Leaves = std::map<std::string, Given>;  // by the key's own path, aliases resolved

/// Paths whose value is an object of further keys.
const std::set<std::string>& sections() {
  static const std::set<std::string> all = [] {
    std::set<std::string> result{"bfloat16"};
    const auto add = [&](const std::string& path) {
      for (auto dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1)) {
        result.insert(path.substr(0, dot));
      }
    };
    for (const auto& key : config_keys()) add(key.info.path);
    for (const auto& key : ignored_keys()) add(key.path);
    for (const auto& key : missing_keys()) add(key.path);
    return result;
  }();
  return all;
}

/// The section bf16 has an old name, and single keys have their aliases.
std::string resolve_alias(const std::string& path) {
  constexpr const char* kOld = "bfloat16.";
  if (path.rfind(kOld, 0) == 0) return "bf16." + path.substr(std::string(kOld).size());
  for (const auto& key : config_keys()) {
    if (key.info.alias == path) return key.info.path;
  }
  return path;
}

/// A section of placement that is given as its device alone is shown as what it should be.
[[noreturn]] void not_a_section(const json& value, const std::string& path, const std::string& at) {
  const auto& keys = config_keys();
  const bool placement = std::any_of(keys.begin(), keys.end(), [&](const auto& key) {
    return key.info.path == path + ".device" && key.info.allowed.kind == Kind::kChoice;
  });
  if (!placement || !value.is_string()) wrong_type(value, {.kind = Kind::kObject}, at + path);
  throw ConfigError(kParse, "wrong type (", at, path, " = ", show(value), "; want {\"device\": ", show(value), "})");
}

void collect(const json& object, const std::string& prefix, const std::string& at, Leaves& leaves) {
  for (const auto& [name, value] : object.items()) {
    const std::string path = prefix + name;
    if (sections().count(path) > 0) {
      if (value.is_null()) continue;
      if (!value.is_object()) not_a_section(value, path, at);
      collect(value, path + ".", at, leaves);
      continue;
    }
    const auto [first, added] = leaves.emplace(resolve_alias(path), Given{at + path, &value});
    if (!added) {
      throw ConfigError(kParse, "given twice under two names (", first->second.path, " = ", show(*first->second.value),
                        ", ", at, path, " = ", show(value), "; leave one out)");
    }
  }
}

bool is_auto(const json& value) { return value.is_string() && value.get_ref<const std::string&>() == "auto"; }

/// Of a key that has a choice of this name, "auto" is a value like any other.
bool has_auto(const Allowed& allowed) {
  return std::find(allowed.choices.begin(), allowed.choices.end(), "auto") != allowed.choices.end();
}

/// Takes the keys without effect and those of missing features out of the leaves.
void take_foreign(Leaves& leaves, std::vector<std::string>& notices) {
  for (const IgnoredKey& key : ignored_keys()) {
    const auto node = leaves.extract(key.path);
    if (node.empty()) continue;
    const auto& [path, value] = node.mapped();
    if (!is_auto(*value)) check_kind(*value, key.allowed, path);
    notices.push_back(path + " has no effect: " + key.reason);
  }
  for (const MissingKey& key : missing_keys()) {
    const auto node = leaves.extract(key.path);
    if (node.empty()) continue;
    const json* value = node.mapped().value;
    std::string path = node.mapped().path;
    if (!key.gate.empty() && !value->is_null()) {
      if (!value->is_object()) wrong_type(*value, {.kind = Kind::kObject, .null = true}, path);
      const auto gate = value->find(key.gate);
      if (gate == value->end()) continue;
      value = &*gate;
      path += "." + key.gate;
    }
    const bool off =
        value->is_null() || is_auto(*value) || std::any_of(key.off.begin(), key.off.end(), [&](const json& off) {
          // In JSON's own arithmetic, false == 0 would hold for some types: compare like with like.
          return off.is_number() == value->is_number() && off == *value;
        });
    if (!off) throw ConfigError(kParse, "not supported (", path, " = ", show(*value), "; ", key.instead, ")");
  }
}

/// Before any value is read: a misspelled type would make right parameters look wrong.
void check_known(const Leaves& leaves, const std::string& at) {
  for (const auto& [own_path, given] : leaves) {
    const auto is_it = [&path = own_path](const auto& key) { return key.info.path == path; };
    if (std::none_of(config_keys().begin(), config_keys().end(), is_it)) unknown_key(*given.value, given.path, at);
  }
}

/// An old form and the key that replaced it, which are two entries of the table.
void check_old_offload(const Leaves& leaves, const std::string& at) {
  for (const char* kind : {"", "_param"}) {
    const std::string old_form = std::string("zero_optimization.cpu_offload") + kind;
    const std::string device =
        std::string("zero_optimization.offload") + (*kind == 0 ? "_optimizer" : kind) + ".device";
    if (leaves.count(old_form) > 0 && leaves.count(device) > 0) {
      throw ConfigError(kParse, "given twice under two names (", at, old_form, ", ", at, device, "; leave one out)");
    }
  }
}

void read_keys(const Leaves& leaves, Config& config) {
  for (const auto& key : config_keys()) {
    const auto leaf = leaves.find(key.info.path);
    if (leaf == leaves.end()) continue;
    const auto& [path, value] = leaf->second;
    if (is_auto(*value) && !has_auto(key.info.allowed)) {
      config.notices.push_back(path + " = \"auto\": nothing fills it in here, its default is used (" +
                               key.info.fallback + ")");
      continue;
    }
    if (!applies(key.info, config)) {
      const bool optimizer = key.info.path.rfind("optimizer.", 0) == 0;
      std::string types;
      for (const std::string& type : key.info.only_with) types += (types.empty() ? "" : ", ") + type;
      throw ConfigError(kParse, "not a parameter of this ", optimizer ? "optimizer" : "scheduler", " (", path, " = ",
                        show(*value), "; only with ", optimizer ? "optimizer" : "scheduler", ".type ", types, ")");
    }
    key.read(config, *value, path);
  }
}

void check_nesterov(const OptimizerHyper& hyper, const std::string& path) {
  if (hyper.nesterov && (hyper.momentum <= 0 || hyper.dampening != 0)) {
    throw ConfigError(kParse, "contradiction (", path, "nesterov = true, momentum = ", hyper.momentum,
                      ", dampening = ", hyper.dampening, "; nesterov wants momentum > 0 and dampening 0)");
  }
}

void check_scheduler(Config& config, const std::string& at) {
  const SchedulerConfig& scheduler = config.scheduler;
  const bool rated = scheduler.type == SchedulerType::kWarmupLr || scheduler.type == SchedulerType::kWarmupDecayLr;
  const bool ends = scheduler.type == SchedulerType::kWarmupDecayLr || scheduler.type == SchedulerType::kWarmupCosineLr;
  if (ends && scheduler.total_num_steps < 1) {
    throw ConfigError(kParse, "required key (", at,
                      "scheduler.params.total_num_steps, which nothing fills in here; want an integer >= 1)");
  }
  if (ends && scheduler.total_num_steps < scheduler.warmup_num_steps) {
    config.notices.push_back(at + "scheduler.params.total_num_steps = " + std::to_string(scheduler.total_num_steps) +
                             " ends before warmup_num_steps = " + std::to_string(scheduler.warmup_num_steps));
  }
  if (scheduler.type == SchedulerType::kWarmupDecayLr && !scheduler.warmup_max_lr &&
      config.optimizer.hyper.lr != kWarmupDecayMaxLr) {
    config.notices.push_back(at + "optimizer.params.lr = " + show(config.optimizer.hyper.lr) +
                             " has no effect: WarmupDecayLR rises to its own warmup_max_lr, which is " +
                             show(kWarmupDecayMaxLr) + " where scheduler.params doesn't set it");
  }
  const bool one_rate = rated && (scheduler.warmup_max_lr || scheduler.type == SchedulerType::kWarmupDecayLr);
  for (std::size_t i = 0; one_rate && i < config.optimizer.groups.size(); ++i) {
    if (config.optimizer.groups[i].hyper.lr != config.optimizer.hyper.lr) {
      config.notices.push_back(at + "optimizer.params.groups[" + std::to_string(i) +
                               "].lr has no effect: scheduler.params.warmup_max_lr sets every group's rate");
    }
  }
}

void check_contradictions(Config& config, const std::string& at) {
  if (config.fp16.enabled && config.bf16) {
    throw ConfigError(kParse, "contradiction (", at, "fp16.enabled = true, ", at,
                      "bf16.enabled = true; enable one of them)");
  }
  const double start = static_cast<double>(std::int64_t{1} << config.fp16.initial_scale_power);
  if (config.fp16.enabled && config.fp16.loss_scale == 0 && start < config.fp16.min_loss_scale) {
    throw ConfigError(kParse, "contradiction (", at, "fp16.initial_scale_power = ", config.fp16.initial_scale_power,
                      " starts below ", at, "fp16.min_loss_scale = ", config.fp16.min_loss_scale, ")");
  }
  check_nesterov(config.optimizer.hyper, at + "optimizer.params.");
  for (std::size_t i = 0; i < config.optimizer.groups.size(); ++i) {
    check_nesterov(config.optimizer.groups[i].hyper, at + "optimizer.params.groups[" + std::to_string(i) + "].");
  }
  check_scheduler(config, at);
  check_placements(config.zero, at);
  for (std::string& notice : placement_notices(config.zero, at)) config.notices.push_back(std::move(notice));
  const std::int64_t steps = config.gradient_accumulation_steps.value_or(1);
  if (!config.managed_gradient_accumulation && steps > 1)
    config.notices.push_back(at + "gradient_accumulation_steps = " + std::to_string(steps) +
                             " divides what backwards without a weight bring, however many a window has: " + at +
                             "managed_gradient_accumulation is false");
}

}  // namespace

Config Config::from_file(const std::filesystem::path& file) { return from_json(read_json_file(file)); }

Config Config::from_string(const std::string& text) { return from_json(parse_json(text, "configuration text")); }

Config Config::from_json(const json& root, const std::string& at) {
  if (!root.is_object()) {
    const std::string what = at.empty() ? "the configuration" : at.substr(0, at.size() - 1);
    throw ConfigError(kParse, "wrong type (", what, " = ", show(root), "; want an object)");
  }
  Leaves leaves;
  collect(root, "", at, leaves);
  Config config;
  take_foreign(leaves, config.notices);
  check_known(leaves, at);
  check_old_offload(leaves, at);
  const auto adam_w_mode = leaves.find("optimizer.params.adam_w_mode");
  const bool chosen = adam_w_mode != leaves.end() && !is_auto(*adam_w_mode->second.value);
  read_keys(leaves, config);
  if (config.optimizer.type == OptimizerType::kAdam && !chosen) config.optimizer.type = OptimizerType::kAdamW;
  check_contradictions(config, at);
  return config;
}

json Config::to_json() const {
  json root = json::object();
  for (const auto& key : config_keys()) {
    if (!key.write || !applies(key.info, *this)) continue;
    std::string pointer = "/" + key.info.path;
    std::replace(pointer.begin(), pointer.end(), '.', '/');
    root[json::json_pointer(pointer)] = key.write(*this);
  }
  return root;
}

std::string describe(const Config& config) { return config.to_json().dump(2); }

}  // namespace ballast
