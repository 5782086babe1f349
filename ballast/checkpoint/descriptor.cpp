#include "ballast/checkpoint/descriptor.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <new>

#include "ballast/base/log.h"

namespace ballast::ckpt {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
static_assert(kBlock % kHugePage == 0);

}  // namespace

void FreeMemory::operator()(std::byte* memory) const noexcept { std::free(memory); }

BlockMemory block_memory() {
  void* const memory = std::aligned_alloc(kHugePage, kBlock);
  if (memory == nullptr) throw std::bad_alloc();
  ::madvise(memory, kBlock, MADV_HUGEPAGE);  // refused: small pages, the same result
  return BlockMemory(static_cast<std::byte*>(memory));
}

Descriptor::Descriptor(const char* operation, std::filesystem::path path, int flags, Owner owner)
    : path_(std::move(path)), owner_(owner) {
  fd_ = sys::open(path_, flags | O_NONBLOCK);  // a pipe waits for nobody's other end; files don't know the flag
  if (fd_ < 0) fail(operation, errno, "opening it");
  struct stat state {};
  if (::fstat(fd_, &state) != 0 || !S_ISREG(state.st_mode)) {
    ::close(fd_);
    throw IoError(operation, "not a file (", path_.string(), rank_text(owner_), ")");
  }
  // A descriptor of its own, so that ends of odd length need no switching of flags under other threads' transfers.
  direct_ = ::open(path_.c_str(), (flags & ~(O_CREAT | O_EXCL | O_TRUNC)) | O_DIRECT | O_CLOEXEC);
  use_direct_ = direct_ >= 0;
}

Descriptor::~Descriptor() {
  if (direct_ >= 0) ::close(direct_);
  if (fd_ >= 0) ::close(fd_);
}

void Descriptor::fail(const char* operation, int error, const std::string& values) const {
  throw io_error(operation, error, path_, values, owner_);
}

std::int64_t Descriptor::bytes() const {
  struct stat state {};
  return ::fstat(fd_, &state) == 0 ? static_cast<std::int64_t>(state.st_size) : 0;
}

template <class Move>
std::int64_t Descriptor::move(const void* memory, std::size_t bytes, std::int64_t offset, Move&& move) {
  const auto odd = (reinterpret_cast<std::uintptr_t>(memory) | bytes | static_cast<std::uint64_t>(offset)) % kAlign;
  if (odd == 0 && use_direct_.load(std::memory_order_relaxed)) {
    const std::int64_t moved = move(direct_);
    // EINVAL: the file system takes O_DIRECT at open and refuses it here, or a transfer came back short at an odd byte.
    if (moved >= 0 || errno != EINVAL) return moved;
    use_direct_.store(false, std::memory_order_relaxed);
  }
  return move(fd_);
}

void Descriptor::write(std::span<const std::byte> data, std::int64_t offset) {
  const std::int64_t moved =
      move(data.data(), data.size(), offset, [&](int fd) { return sys::write(fd, path_, data, offset); });
  const auto want = static_cast<std::int64_t>(data.size());
  if (moved < 0) fail("checkpoint.write", errno, std::to_string(want) + " bytes at byte " + std::to_string(offset));
  check_eq<IoError>("checkpoint.write", "short write", moved, want, "bytes; ", path_.string(), rank_text(owner_),
                    "; free space there, or save into another folder");
}

std::int64_t Descriptor::read(std::span<std::byte> to, std::int64_t offset) {
  const std::int64_t moved =
      move(to.data(), to.size(), offset, [&](int fd) { return sys::read(fd, path_, to, offset); });
  if (moved < 0) fail("checkpoint.read", errno, std::to_string(to.size()) + " bytes at byte " + std::to_string(offset));
  return moved;
}

void Descriptor::reserve(std::int64_t bytes) {
  if (bytes > 0 && sys::reserve(fd_, path_, bytes) != 0)
    fail("checkpoint.write", errno, "making room for " + std::to_string(bytes) + " bytes");
}

void Descriptor::cut(std::int64_t bytes) {
  if (::ftruncate(fd_, bytes) != 0)
    fail("checkpoint.write", errno, "cutting it to " + std::to_string(bytes) + " bytes");
}

void Descriptor::sync() {
  if (sys::sync(fd_, path_) != 0) fail("checkpoint.write", errno, "making it durable");
}

void Descriptor::close() {
  if (direct_ >= 0) ::close(std::exchange(direct_, -1));
  if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) fail("checkpoint.write", errno, "closing it");
}

}  // namespace ballast::ckpt
