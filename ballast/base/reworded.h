#pragma once

#include <span>
#include <string>
#include <utility>

namespace ballast {

/// The text with each of these words replaced wherever it stands, in the order of the list. The library's messages name
/// its own calls and options; whoever shows them to people who call something else replaces those.
std::string reworded(std::string text, std::span<const std::pair<const char*, const char*>> words);

}  // namespace ballast
