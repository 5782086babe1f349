#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ballast {

/// XXH3, 64 bits, seed 0: at the speed of memory, and any flipped bit changes it. Not for adversaries. between: called
/// every half MiB, so that a long one doesn't leave a disk without work.
std::uint64_t checksum(std::span<const std::byte> data, const std::function<void()>& between = {});

/// The same of data that comes in parts. Move-only.
class Checksum {
 public:
  Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  ~Checksum();
  void add(std::span<const std::byte> part);
  /// Of what was added so far.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// 16 hexadecimal digits, as files hold a checksum, and back; nothing for any other text.
std::string checksum_text(std::uint64_t checksum);
std::optional<std::uint64_t> checksum_of_text(std::string_view text);

}  // namespace ballast
