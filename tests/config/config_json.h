#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "ballast/base/error.h"
#include "ballast/config/config.h"
#include "ballast/config/key.h"

namespace ballast::testing {

/// The text of the ConfigError that reading this throws; empty where it is accepted.
inline std::string error_of(const nlohmann::json& root) {
  try {
    Config::from_json(root);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

inline std::string error_of_text(const std::string& text) {
  try {
    Config::from_string(text);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

inline nlohmann::json::json_pointer pointer_to(const std::string& path) {
  std::string pointer = "/" + path;
  for (char& c : pointer) c = c == '.' ? '/' : c;
  return nlohmann::json::json_pointer(pointer);
}

/// Sets a dotted path; in front of "[]." stands a list that gets one element which is otherwise valid.
inline void set_path(nlohmann::json& root, const std::string& path, const nlohmann::json& value) {
  const auto list = path.find("[].");
  if (list != std::string::npos) {
    nlohmann::json element{{"patterns", {"*"}}};
    set_path(element, path.substr(list + 3), value);
    set_path(root, path.substr(0, list), nlohmann::json::array({element}));
    return;
  }
  root[pointer_to(path)] = value;
}

inline nlohmann::json get_path(const nlohmann::json& root, const std::string& path) {
  const auto list = path.find("[].");
  if (list == std::string::npos) return root.at(pointer_to(path));
  return get_path(root.at(pointer_to(path.substr(0, list))).at(0), path.substr(list + 3));
}

/// The smallest configuration in which the key applies.
inline nlohmann::json where_it_applies(const schema::KeyInfo& key) {
  nlohmann::json root = nlohmann::json::object();
  if (key.only_with.empty()) return root;
  if (key.path.rfind("optimizer.", 0) == 0) {
    set_path(root, "optimizer.type", key.only_with.front());
  } else {
    set_path(root, "scheduler.type", key.only_with.front());
    if (key.only_with.front() != "WarmupLR") set_path(root, "scheduler.params.total_num_steps", 10000);
  }
  return root;
}

inline nlohmann::json with_key(const schema::KeyInfo& key, const nlohmann::json& value) {
  nlohmann::json root = where_it_applies(key);
  set_path(root, key.path, value);
  return root;
}

/// How an error names the path: the first element of a list has index 0.
inline std::string written(std::string path) {
  const auto list = path.find("[]");
  return list == std::string::npos ? path : path.replace(list, 2, "[0]");
}

}  // namespace ballast::testing
