#include "ballast/config/value.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "ballast/base/error.h"
#include "ballast/config/nearest.h"

namespace ballast::schema {

namespace {

using nlohmann::json;

constexpr const char* kParse = "config.parse";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::string bound(double value) { return json(value).dump(); }

std::string integer_or_number(double value) {
  return std::floor(value) == value && std::abs(value) < 1e15 ? std::to_string(static_cast<std::int64_t>(value))
                                                              : bound(value);
}

std::string range_text(const Allowed& allowed) {
  const bool low = allowed.min > -kInfinity, high = allowed.max < kInfinity;
  if (low && high) {
    return std::string(" in ") + (allowed.open_min ? "(" : "[") + integer_or_number(allowed.min) + ", " +
           integer_or_number(allowed.max) + (allowed.open_max ? ")" : "]");
  }
  if (low) return std::string(allowed.open_min ? " > " : " >= ") + integer_or_number(allowed.min);
  return high ? std::string(allowed.open_max ? " < " : " <= ") + integer_or_number(allowed.max) : "";
}

bool in_range(double value, const Allowed& allowed) {
  return (allowed.open_min ? value > allowed.min : value >= allowed.min) &&
         (allowed.open_max ? value < allowed.max : value <= allowed.max);
}

[[noreturn]] void out_of_range(const json& value, const Allowed& allowed, const std::string& path) {
  throw ConfigError(kParse, "out of range (", path, " = ", show(value), "; want ", allowed.text(), ")");
}

bool equal_ignoring_case(const std::string& a, const std::string& b) {
  auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (lower(a[i]) != lower(b[i])) return false;
  }
  return true;
}

}  // namespace

std::string Allowed::text() const {
  std::string text;
  switch (kind) {
    case Kind::kBool:
      text = "true or false";
      break;
    case Kind::kInteger:
      text = "an integer" + range_text(*this);
      break;
    case Kind::kNumber:
      text = "a number" + range_text(*this);
      break;
    case Kind::kChoice:
      text = "one of ";
      for (std::size_t i = 0; i < choices.size(); ++i) text += (i ? ", \"" : "\"") + choices[i] + '"';
      break;
    case Kind::kTexts:
      text = "a list of non-empty texts, or one text";
      break;
    case Kind::kPair:
      text = "a list of two numbers" + range_text(*this);
      break;
    case Kind::kGroups:
      text = "a list of objects";
      break;
    case Kind::kText:
      text = "text";
      break;
    case Kind::kObject:
      text = "an object";
      break;
    case Kind::kAny:
      text = "anything";
      break;
  }
  return null ? text + ", or null" : text;
}

std::string show(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = value.get<double>();
    return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  }
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  constexpr std::size_t kLongest = 80;
  if (text.size() > kLongest) text.replace(kLongest - 3, std::string::npos, "...");
  return text;
}

void wrong_type(const json& value, const Allowed& allowed, const std::string& path) {
  throw ConfigError(kParse, "wrong type (", path, " = ", show(value), "; want ", allowed.text(), ")");
}

void unknown_key(const json& value, const std::string& path, const std::string& at) {
  throw ConfigError(kParse, "unknown key (", path, " = ", show(value), "; nearest known key: ", at,
                    nearest_path(path.substr(at.size()), known_paths()), ")");
}

bool read_bool(const json& value, const Allowed& allowed, const std::string& path) {
  if (!value.is_boolean()) wrong_type(value, allowed, path);
  return value.get<bool>();
}

std::int64_t read_integer(const json& value, const Allowed& allowed, const std::string& path) {
  if (!value.is_number()) wrong_type(value, allowed, path);
  std::int64_t integer = 0;
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (!std::isfinite(number)) out_of_range(value, allowed, path);
    if (std::floor(number) != number) wrong_type(value, allowed, path);
    if (std::abs(number) >= 0x1p63) out_of_range(value, allowed, path);
    integer = static_cast<std::int64_t>(number);
  } else {
    // An unsigned value beyond int64 would wrap to a negative one.
    if (value.is_number_unsigned() && value.get<std::uint64_t>() > 0x7fff'ffff'ffff'ffffULL) {
      out_of_range(value, allowed, path);
    }
    integer = value.get<std::int64_t>();
  }
  if (!in_range(static_cast<double>(integer), allowed)) out_of_range(value, allowed, path);
  return integer;
}

double read_number(const json& value, const Allowed& allowed, const std::string& path) {
  if (!value.is_number()) wrong_type(value, allowed, path);
  const double number = value.get<double>();
  if (!std::isfinite(number) || !in_range(number, allowed)) out_of_range(value, allowed, path);
  return number;
}

int read_choice(const json& value, const KeyInfo& key, const std::string& path) {
  if (!value.is_string()) wrong_type(value, key.allowed, path);
  const std::string text = value.get<std::string>();
  for (std::size_t i = 0; i < key.allowed.choices.size(); ++i) {
    if (equal_ignoring_case(text, key.allowed.choices[i])) return static_cast<int>(i);
  }
  for (const Refused& refused : key.refused) {
    if (equal_ignoring_case(text, refused.choice)) {
      throw ConfigError(kParse, "not supported (", path, " = ", show(value), "; ", refused.instead, ")");
    }
  }
  throw ConfigError(kParse, "unknown value (", path, " = ", show(value), "; want ", key.allowed.text(), ")");
}

std::string read_text(const json& value, const Allowed& allowed, const std::string& path) {
  if (allowed.null && value.is_null()) return "";
  if (!value.is_string()) wrong_type(value, allowed, path);
  return value.get<std::string>();
}

std::vector<std::string> read_texts(const json& value, const Allowed& allowed, const std::string& path) {
  const json list = value.is_string() ? json::array({value}) : value;
  if (!list.is_array()) wrong_type(value, allowed, path);
  std::vector<std::string> texts;
  for (const json& element : list) {
    if (!element.is_string()) wrong_type(value, allowed, path);
    texts.push_back(element.get<std::string>());
    if (texts.back().empty()) out_of_range(value, allowed, path);
  }
  return texts;
}

std::pair<double, double> read_pair(const json& value, const Allowed& allowed, const std::string& path) {
  if (!value.is_array() || value.size() != 2 || !value[0].is_number() || !value[1].is_number()) {
    wrong_type(value, allowed, path);
  }
  return {read_number(value[0], allowed, path + "[0]"), read_number(value[1], allowed, path + "[1]")};
}

void check_kind(const json& value, const Allowed& allowed, const std::string& path) {
  const auto fits = [&] {
    switch (allowed.kind) {
      case Kind::kBool:
        return value.is_boolean();
      case Kind::kInteger:
      case Kind::kNumber:
        return value.is_number();
      case Kind::kChoice:
      case Kind::kText:
        return value.is_string();
      case Kind::kTexts:
      case Kind::kPair:
      case Kind::kGroups:
        return value.is_array();
      case Kind::kObject:
        return value.is_object();
      case Kind::kAny:
        return true;
    }
    return true;
  };
  if (!fits() && !(allowed.null && value.is_null())) wrong_type(value, allowed, path);
}

}  // namespace ballast::schema
