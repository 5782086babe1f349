#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace ballast {

/// Strict JSON: no comments, no trailing commas, no key twice in one object. Throws ConfigError with the source, and
/// the line and column (both from 1) of a syntax error or the dotted path of a repeated key. source: a name for the
/// errors.
nlohmann::json parse_json(const std::string& text, const std::string& source);

/// The same from a file. A file that can't be read is a ConfigError with the path and the system's reason.
nlohmann::json read_json_file(const std::filesystem::path& file);

}  // namespace ballast
