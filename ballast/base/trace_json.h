#pragma once

#include <string>
#include <string_view>

namespace ballast::trace {

/// The text as a JSON string, quotes included. Bytes that are no UTF-8 become U+FFFD each: a module may have any name.
std::string json_string(std::string_view text);

}  // namespace ballast::trace
