#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace ballast::ckpt {

/// Strict JSON from a stranger: valid UTF-8, no key twice in one object, nested at most `depth` deep. Throws IoError
/// with the file's name and where the text is wrong.
nlohmann::json parse_bounded(std::string_view text, int depth, const std::string& file);

}  // namespace ballast::ckpt
