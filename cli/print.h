#pragma once

#include <array>
#include <cstdio>
#include <string>

namespace ballast::cli {

/// As snprintf, up to 255 bytes.
template <class... Values>
std::string print(const char* format, Values... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

}  // namespace ballast::cli
