#include <tuple>

#include "ballast/base/error.h"
#include "ballast/config/bind.h"
#include "ballast/config/nearest.h"

namespace ballast::schema {

namespace {

using nlohmann::json;

constexpr const char* kGroup = "optimizer.params.groups[].";

const std::vector<std::string> kAdams{"Adam", "AdamW"};
const std::vector<std::string> kWithBetas{"Adam", "AdamW", "Lion"};
const std::vector<std::string> kSgdOnly{"SGD"};

Key<OptimizerHyper> betas_key() {
  Key<OptimizerHyper> key;
  key.info = {.path = "betas",
              .allowed = {.kind = Kind::kPair, .min = 0, .max = 1, .open_max = true},
              .meaning = "Decay rates of the first and the second moment.",
              .fallback = "[0.9,0.999]",
              .only_with = kWithBetas};
  key.read = [allowed = key.info.allowed](OptimizerHyper& hyper, const json& value, const std::string& path) {
    std::tie(hyper.beta1, hyper.beta2) = read_pair(value, allowed, path);
  };
  key.write = [](const OptimizerHyper& hyper) { return json{hyper.beta1, hyper.beta2}; };
  return key;
}

/// Patterns of a group's names; the only member of an element that isn't a hyper-parameter.
const KeyInfo& patterns_key() {
  static const KeyInfo key{.path = std::string(kGroup) + "patterns",
                           .allowed = texts(),
                           .meaning =
                               "Shell wildcards (`*`, `?`, `[a-z]`) over the module's dotted parameter names; "
                               "the first group with a match has the parameter.",
                           .fallback = "required"};
  return key;
}

bool fits(const KeyInfo& key, const Config& config, const std::string& path, const json& value) {
  if (applies(key, config)) return true;
  std::string types;
  for (const std::string& type : key.only_with) types += (types.empty() ? "" : ", ") + type;
  throw ConfigError("config.parse", "not a parameter of this optimizer (", path, " = ", show(value),
                    "; only with optimizer.type ", types, ")");
}

OptimizerGroup read_group(const Config& config, const json& element, const std::string& path) {
  if (!element.is_object()) wrong_type(element, object(), path);
  OptimizerGroup group;
  group.hyper = config.optimizer.hyper;
  for (const auto& [name, value] : element.items()) {
    const std::string here = path + "." + name;
    if (name == "patterns") {
      group.patterns = read_texts(value, patterns_key().allowed, here);
      continue;
    }
    const Key<OptimizerHyper>* found = nullptr;
    for (const auto& key : hyper_keys()) {
      if (key.info.path == name) found = &key;
    }
    if (found == nullptr) {
      const std::string at = path.substr(0, path.rfind("optimizer.params.groups["));
      if (name == "params")
        throw ConfigError("config.parse", "unknown key (", here, " = ", show(value), "; nearest known key: ", at,
                          patterns_key().path, ", which chooses parameters by their names)");
      unknown_key(value, here, at);
    }
    if (fits(found->info, config, here, value) && value != json("auto")) found->read(group.hyper, value, here);
  }
  if (group.patterns.empty()) {
    throw ConfigError("config.parse", "a group without patterns matches nothing (", path, " = ", show(element),
                      "; want patterns: ", patterns_key().allowed.text(), ")");
  }
  return group;
}

}  // namespace

const std::vector<Key<OptimizerHyper>>& hyper_keys() {
  using Hyper = OptimizerHyper;
  static const std::vector<Key<Hyper>> keys{
      bind<Hyper>(
          {.path = "lr",
           .allowed = number(0),
           .meaning = "Learning rate; a scheduler takes its place where it says so."},
          [](auto& h) -> auto& { return h.lr; }),
      betas_key(),
      bind<Hyper>(
          {.path = "eps",
           .allowed = number(0),
           .meaning = "Added to the root of the second moment.",
           .only_with = kAdams},
          [](auto& h) -> auto& { return h.eps; }),
      bind<Hyper>(
          {.path = "weight_decay",
           .allowed = number(0),
           .meaning = "AdamW and Lion: decoupled, the weight shrinks by lr * weight_decay; Adam and SGD: "
                      "weight_decay * weight is added to the gradient."},
          [](auto& h) -> auto& { return h.weight_decay; }),
      bind<Hyper>(
          {.path = "momentum", .allowed = number(0), .meaning = "Momentum.", .only_with = kSgdOnly},
          [](auto& h) -> auto& { return h.momentum; }),
      bind<Hyper>(
          {.path = "dampening",
           .allowed = number(0),
           .meaning = "The gradient enters the momentum times 1 - dampening.",
           .only_with = kSgdOnly},
          [](auto& h) -> auto& { return h.dampening; }),
      bind<Hyper>(
          {.path = "nesterov",
           .allowed = boolean(),
           .meaning = "Nesterov's momentum; needs momentum > 0 and dampening 0.",
           .only_with = kSgdOnly},
          [](auto& h) -> auto& { return h.nesterov; }),
  };
  return keys;
}

std::vector<OptimizerGroup> read_groups(const Config& config, const json& value, const std::string& path) {
  if (!value.is_array()) wrong_type(value, {.kind = Kind::kGroups}, path);
  std::vector<OptimizerGroup> groups;
  for (std::size_t i = 0; i < value.size(); ++i) {
    groups.push_back(read_group(config, value[i], path + "[" + std::to_string(i) + "]"));
  }
  return groups;
}

json write_groups(const Config& config) {
  json groups = json::array();
  for (const OptimizerGroup& group : config.optimizer.groups) {
    json element{{"patterns", group.patterns}};
    for (const auto& key : hyper_keys()) {
      if (applies(key.info, config)) element[key.info.path] = key.write(group.hyper);
    }
    groups.push_back(std::move(element));
  }
  return groups;
}

std::vector<KeyInfo> documented_keys() {
  std::vector<KeyInfo> keys;
  for (const auto& key : config_keys()) keys.push_back(key.info);
  keys.push_back(patterns_key());
  for (const auto& key : hyper_keys()) {
    KeyInfo info = key.info;
    info.path = kGroup + info.path;
    info.meaning = "As `optimizer.params." + key.info.path + "`, for this group.";
    info.fallback = "the optimizer's own";
    keys.push_back(std::move(info));
  }
  return keys;
}

}  // namespace ballast::schema
