#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "ballast/base/error.h"
#include "ballast/checkpoint/storage.h"
#include "ballast/checkpoint/testing.h"

namespace ballast::ckpt {

using testing::FileOp;

/// The calls to the system, each first put to the plan of a test, if there is one. They return what the system's own
/// do, or -1 with errno. EINTR is resumed.
namespace sys {
int open(const std::filesystem::path& path, int flags);
/// Moves all of it, in as many calls as it takes; less where a file ends (read) or the system moves nothing.
std::int64_t read(int fd, const std::filesystem::path& path, std::span<std::byte> to, std::int64_t offset);
std::int64_t write(int fd, const std::filesystem::path& path, std::span<const std::byte> data, std::int64_t offset);
/// Space for a file of that length, which it then has. 0 also where the file system can't say.
int reserve(int fd, const std::filesystem::path& path, std::int64_t bytes);
int sync(int fd, const std::filesystem::path& path);
int rename(const std::filesystem::path& from, const std::filesystem::path& to, bool exchange);
int make_folder(const std::filesystem::path& path);
int remove(const std::filesystem::path& path);  // a file or an empty folder
}  // namespace sys

/// The error of one of them. values: "got 3, want 4 bytes; ", or nothing.
IoError io_error(const char* operation, int error, const std::filesystem::path& path, const std::string& values,
                 Owner owner);
/// "; rank 3", or nothing.
std::string rank_text(Owner owner);

inline constexpr std::int64_t kBlock = std::int64_t{4} << 20;  // bytes of one transfer

}  // namespace ballast::ckpt
