#pragma once

#include <cstdint>
#include <string>

namespace ballast {

/// "512 B", "3.2 MiB", "1.4 GiB": three significant digits, powers of 1024.
std::string format_bytes(std::int64_t bytes);

}  // namespace ballast
