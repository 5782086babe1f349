#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ballast/config/key.h"

/// One JSON value against what its key allows. All throw ConfigError with path, value and what is allowed. A boolean is
/// never a number nor the reverse, text is never a number, and an integer may be written 5e8.
namespace ballast::schema {

bool read_bool(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
std::int64_t read_integer(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
double read_number(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
/// The choice's index.
int read_choice(const nlohmann::json& value, const KeyInfo& key, const std::string& path);
/// null, where it is allowed, gives the empty text.
std::string read_text(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
/// A list of non-empty texts; one text stands for a list of one, as in DeepSpeed.
std::vector<std::string> read_texts(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
std::pair<double, double> read_pair(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
/// Only the type.
void check_kind(const nlohmann::json& value, const Allowed& allowed, const std::string& path);

[[noreturn]] void wrong_type(const nlohmann::json& value, const Allowed& allowed, const std::string& path);
/// Names the nearest known key. at: what the path begins with before the schema's own.
[[noreturn]] void unknown_key(const nlohmann::json& value, const std::string& path, const std::string& at);

/// The value as an error shows it: one line, shortened, NaN and infinities by name.
std::string show(const nlohmann::json& value);

}  // namespace ballast::schema
