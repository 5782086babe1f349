#include "ballast/tiers/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <system_error>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/remove_tree.h"
#include "ballast/tiers/disk_file.h"

namespace ballast::tiers {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "ballast-";
constexpr const char* kMarker = "ballast.run";
constexpr const char* kFirstLine =
    "Ballast keeps the states of a running training here; it deletes this folder itself.";

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0 || name[0] == '\0') return "localhost";
  std::string host = name.data();
  for (char& letter : host)
    if (letter == '/') letter = '_';
  return host;
}

/// Changes with every start of the kernel and is equal in all of its containers.
std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

std::string marker_text() { return std::string(kFirstLine) + "\n" + host_name() + "\n" + boot_id() + "\n"; }

/// A lock means something only between processes that see the same one: those of this kernel, and those that ran on
/// this host before it started.
bool made_here(const fs::path& marker) {
  std::ifstream file(marker);
  std::string first, host, boot;
  std::getline(file, first);
  std::getline(file, host);
  std::getline(file, boot);
  return first == kFirstLine && (host == host_name() || (!boot.empty() && boot == boot_id()));
}

std::int64_t bytes_on_disk(const fs::path& folder) {
  std::int64_t bytes = 0;
  std::error_code ignored;
  for (fs::recursive_directory_iterator at(folder, ignored), end; at != end; at.increment(ignored)) {
    struct stat state {};
    if (::lstat(at->path().c_str(), &state) == 0) bytes += static_cast<std::int64_t>(state.st_blocks) * 512;
  }
  return bytes;
}

/// The bytes that the folder held where its run was dead and it has been removed, else -1.
std::int64_t remove_if_dead(const fs::path& folder) {
  const fs::path marker = folder / kMarker;
  const int fd = ::open(marker.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return -1;
  std::int64_t bytes = -1;
  struct stat state {};
  // No links left: another rank has removed it between our open and our lock.
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::fstat(fd, &state) == 0 && state.st_nlink > 0 && made_here(marker)) {
    bytes = bytes_on_disk(folder);
    if (const std::error_code failed = remove_tree(folder)) {
      log_warning("tiers: could not remove ", folder.string(), " of a dead run: ", failed.message());
      bytes = -1;
    }
  }
  ::close(fd);
  return bytes;
}

void remove_dead(const fs::path& nvme_path) {
  std::int64_t bytes = 0;
  int folders = 0;
  std::error_code ignored;
  for (fs::directory_iterator at(nvme_path, ignored), end; at != end; at.increment(ignored)) {
    if (at->path().filename().string().rfind(kPrefix, 0) != 0) continue;
    const std::int64_t freed = remove_if_dead(at->path());
    if (freed < 0) continue;
    bytes += freed;
    ++folders;
  }
  if (folders > 0) {
    log_info("tiers: removed ", folders, folders == 1 ? " folder" : " folders", " of dead runs in ", nvme_path.string(),
             " (", format_bytes(bytes), " freed)");
  }
}

void check_parent(const fs::path& nvme_path, int rank) {
  std::error_code error;
  const fs::file_status status = fs::status(nvme_path, error);
  if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
    throw IoError("tiers.run_folder", error.message(), " (looking for nvme_path ", nvme_path.string(), ", rank ", rank,
                  "; name a folder on a local disk)");
  }
  if (!fs::exists(status)) {
    throw IoError("tiers.run_folder", "nvme_path does not exist (", nvme_path.string(), ", rank ", rank,
                  "; create it, or name a folder on a local disk)");
  }
  if (!fs::is_directory(status)) {
    throw IoError("tiers.run_folder", "nvme_path is not a folder (", nvme_path.string(), ", rank ", rank,
                  "; name a folder on a local disk)");
  }
}

fs::path make_folder(const fs::path& nvme_path, int rank) {
  std::random_device random;
  for (;;) {
    std::ostringstream name;
    name << kPrefix << host_name() << '-' << ::getpid() << "-r" << rank << '-' << std::hex << random();
    const fs::path folder = nvme_path / name.str();
    if (::mkdir(folder.c_str(), 0700) == 0) return folder;
    if (errno != EEXIST) {
      throw IoError("tiers.run_folder", errno_text(errno), " (creating ", folder.string(), ", rank ", rank,
                    "; nvme_path must be writable, with space)");
    }
  }
}

/// Returns the descriptor of the locked marker. It gets its name only when it is locked and written, so that nobody
/// takes a folder that is just being made for a dead one.
int make_marker(const fs::path& folder, int rank) {
  const fs::path unnamed = folder / "ballast.new";
  const std::string text = marker_text();
  const int fd = ::open(unnamed.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const bool made = fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) == 0 &&
                    ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                    ::rename(unnamed.c_str(), (folder / kMarker).c_str()) == 0;
  if (made) return fd;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  remove_tree(folder);
  throw IoError("tiers.run_folder", errno_text(error), " (creating and locking ", (folder / kMarker).string(),
                ", rank ", rank, "; nvme_path must be on a file system with space and flock, best a local disk)");
}

}  // namespace

RunFolder::RunFolder(const fs::path& nvme_path, int rank) {
  check_parent(nvme_path, rank);
  remove_dead(nvme_path);
  path_ = make_folder(nvme_path, rank);
  marker_ = make_marker(path_, rank);
}

RunFolder::~RunFolder() {
  remove_tree(path_);
  ::close(marker_);  // last: while it is locked nobody else removes the folder
}

}  // namespace ballast::tiers
