#include "ballast/base/bytes.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace ballast {

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::fabs(value) >= 1024 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  const int decimals = unit == 0 || std::fabs(value) >= 100 ? 0 : std::fabs(value) >= 10 ? 1 : 2;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f %s", decimals, value, kUnits[unit]);
  return text.data();
}

}  // namespace ballast
