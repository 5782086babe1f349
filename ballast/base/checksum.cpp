#include "ballast/base/checksum.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#define XXH_INLINE_ALL  // from the header alone: nothing to link, and vectorised with this file's flags
#include <xxhash.h>

namespace ballast {

struct Checksum::State {
  ::XXH3_state_t hash;
};

Checksum::Checksum() : state_(new State) { ::XXH3_64bits_reset(&state_->hash); }
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;
Checksum::~Checksum() = default;
void Checksum::add(std::span<const std::byte> part) {
  if (!part.empty()) ::XXH3_64bits_update(&state_->hash, part.data(), part.size());
}
std::uint64_t Checksum::value() const { return ::XXH3_64bits_digest(&state_->hash); }

std::uint64_t checksum(std::span<const std::byte> data, const std::function<void()>& between) {
  constexpr std::size_t kSlice = 512 << 10;
  ::XXH3_state_t state;
  ::XXH3_64bits_reset(&state);
  while (!data.empty()) {
    const auto slice = data.first(std::min(kSlice, data.size()));
    ::XXH3_64bits_update(&state, slice.data(), slice.size());
    data = data.subspan(slice.size());
    if (between) between();
  }
  return ::XXH3_64bits_digest(&state);
}

std::string checksum_text(std::uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

std::optional<std::uint64_t> checksum_of_text(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace ballast
