#include "ballast/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "ballast/base/error.h"

namespace ballast::data {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);  // the mapping keeps the file
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  // O_NONBLOCK: opening a pipe that nobody writes to must end in the error below, not in waiting.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) throw IoError("data.open", "can't open the file (", path.string(), ": ", std::strerror(errno), ")");
  struct stat status {};
  if (::fstat(file.fd, &status) != 0)
    throw IoError("data.open", "can't read the file's size (", path.string(), ": ", std::strerror(errno), ")");
  if (!S_ISREG(status.st_mode)) throw IoError("data.open", "not a regular file (", path.string(), ")");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  void* start = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  if (start == MAP_FAILED)
    throw IoError("data.open", "can't map the file (", path.string(), ", ", size_, " bytes: ", std::strerror(errno),
                  errno == ENOMEM ? "; if the folder holds more files than vm.max_map_count, join them" : "", ")");
  start_ = static_cast<const std::byte*>(start);
}

MappedFile::MappedFile(MappedFile&& from) noexcept
    : path_(std::move(from.path_)), start_(std::exchange(from.start_, nullptr)), size_(std::exchange(from.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile from) noexcept {
  std::swap(path_, from.path_);
  std::swap(start_, from.start_);
  std::swap(size_, from.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (start_) ::munmap(const_cast<std::byte*>(start_), size_);
}

}  // namespace ballast::data
