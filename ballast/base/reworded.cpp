#include "ballast/base/reworded.h"

#include <cstring>

namespace ballast {

std::string reworded(std::string text, std::span<const std::pair<const char*, const char*>> words) {
  for (const auto& [word, other] : words)
    for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos; at += std::strlen(other))
      text.replace(at, std::strlen(word), other);
  return text;
}

}  // namespace ballast
