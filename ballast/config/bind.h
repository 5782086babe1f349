#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ballast/config/key.h"
#include "ballast/config/value.h"

/// How the tables of keys are written: bind(info, field) makes a Key whose field's C++ type says how it is read.
namespace ballast::schema {

inline Allowed boolean() { return {.kind = Kind::kBool}; }
inline Allowed integer(double min, double max = std::numeric_limits<double>::infinity()) {
  return {.kind = Kind::kInteger, .min = min, .max = max};
}
inline Allowed number(double min, double max = std::numeric_limits<double>::infinity()) {
  return {.kind = Kind::kNumber, .min = min, .max = max};
}
inline Allowed choice(std::vector<std::string> choices) {
  return {.kind = Kind::kChoice, .choices = std::move(choices)};
}
inline Allowed text() { return {.kind = Kind::kText}; }
inline Allowed texts() { return {.kind = Kind::kTexts}; }
inline Allowed object() { return {.kind = Kind::kObject}; }
inline Allowed or_null(Allowed allowed) {
  allowed.null = true;
  return allowed;
}

template <class Value>
void decode(Value& to, const nlohmann::json& value, const KeyInfo& key, const std::string& path) {
  if constexpr (std::is_same_v<Value, bool>) {
    to = read_bool(value, key.allowed, path);
  } else if constexpr (std::is_enum_v<Value>) {
    to = static_cast<Value>(read_choice(value, key, path));
  } else if constexpr (std::is_integral_v<Value>) {
    to = static_cast<Value>(read_integer(value, key.allowed, path));  // the key's range fits the type
  } else if constexpr (std::is_floating_point_v<Value>) {
    to = read_number(value, key.allowed, path);
  } else if constexpr (std::is_same_v<Value, std::string>) {
    to = read_text(value, key.allowed, path);
  } else {
    to = read_texts(value, key.allowed, path);
  }
}

template <class Value>
void decode(std::optional<Value>& to, const nlohmann::json& value, const KeyInfo& key, const std::string& path) {
  to.reset();
  if (!value.is_null()) decode(to.emplace(), value, key, path);
}

template <class Value>
nlohmann::json encode(const Value& value, const KeyInfo& key) {
  if constexpr (std::is_enum_v<Value>) {
    return key.allowed.choices[static_cast<std::size_t>(value)];
  } else if constexpr (std::is_same_v<Value, std::string>) {
    return value.empty() && key.allowed.null ? nlohmann::json() : nlohmann::json(value);
  } else {
    return value;
  }
}

template <class Value>
nlohmann::json encode(const std::optional<Value>& value, const KeyInfo& key) {
  return value ? encode(*value, key) : nlohmann::json();
}

/// field: a generic callable from Owner (const or not) to a reference to the field.
template <class Owner, class Field>
Key<Owner> bind(KeyInfo info, Field field) {
  Key<Owner> key;
  const Owner defaults;
  if (info.fallback.empty()) info.fallback = encode(field(defaults), info).dump();
  key.read = [info, field](Owner& owner, const nlohmann::json& value, const std::string& path) {
    decode(field(owner), value, info, path);
  };
  key.write = [info, field](const Owner& owner) { return encode(field(owner), info); };
  key.info = std::move(info);
  return key;
}

}  // namespace ballast::schema
