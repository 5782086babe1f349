#include "ballast/tiers/host_arena.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#include "ballast/base/bytes.h"
#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/tiers/disk_file.h"
#include "ballast/tiers/pin.h"

namespace ballast::tiers {
namespace {

constexpr std::int64_t kHugePage = std::int64_t{2} << 20;
constexpr std::int64_t kPage = 4096;

/// Takes the pages from the system on several threads; page-locking takes them one by one on one.
void touch(std::byte* data, std::int64_t bytes) {
  const std::int64_t slice =
      round_up(ceil_div(bytes, std::clamp(std::thread::hardware_concurrency(), 1u, 8u)), kHugePage);
  std::vector<std::jthread> threads;
  for (std::int64_t begin = 0; begin < bytes; begin += slice) {
    threads.emplace_back([data, begin, end = std::min(bytes, begin + slice)] {
      for (std::int64_t at = begin; at < end; at += kPage) *static_cast<volatile std::byte*>(data + at) = std::byte{0};
    });
  }
}

}  // namespace

class HostArena::Slab {
 public:
  Slab(std::int64_t bytes, bool pin, c10::Device device)
      : bytes_(static_cast<std::size_t>(round_up(bytes, kHugePage))) {
    if (bytes == 0) return;
    // One huge page more than asked for, so that the first byte can lie at the start of one.
    mapped_ = ::mmap(nullptr, bytes_ + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
      throw MemoryError("tiers.host_arena", "the system refuses memory: ", errno_text(errno), " (", format_bytes(bytes),
                        "; free memory, or place less on the host)");
    }
    data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::intptr_t>(mapped_), kHugePage));
    ::madvise(data_, bytes_, MADV_HUGEPAGE);  // a matter of speed: whether the system does so doesn't count
    if (!pin || device.is_cpu()) return;
    touch(data_, bytes);
    try {
      pinned_ = tiers::pin(data_, bytes_, device);
    } catch (...) {
      ::munmap(mapped_, bytes_ + kHugePage);
      throw;
    }
  }
  ~Slab() {
    if (!data_) return;
    if (pinned_) unpin(data_);
    ::munmap(mapped_, bytes_ + kHugePage);
  }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;

  std::byte* data() const noexcept { return data_; }
  bool pinned() const noexcept { return pinned_; }

 private:
  const std::size_t bytes_;
  void* mapped_ = nullptr;
  std::byte* data_ = nullptr;
  bool pinned_ = false;
};

HostArena::HostArena(std::int64_t bytes, bool pin, c10::Device device)
    : slab_(std::make_shared<Slab>(bytes, pin, device)), bytes_(bytes) {}

bool HostArena::pinned() const noexcept { return slab_->pinned(); }

std::int64_t HostArena::bytes_of(std::int64_t numel, c10::ScalarType type) {
  return round_up(numel * static_cast<std::int64_t>(c10::elementSize(type)), kPage);
}

at::Tensor HostArena::allocate(std::int64_t numel, c10::ScalarType type) {
  const std::int64_t bytes = bytes_of(numel, type);
  if (bytes > left()) {
    throw MemoryError("tiers.host_arena", "the plan has no room left (wanted ", bytes, ", left ", left(), " of ",
                      bytes_, " bytes)");
  }
  std::byte* const data = slab_->data() + used_;
  used_ += bytes;
  return at::from_blob(
      data, {numel}, [slab = slab_](void*) {}, at::TensorOptions().dtype(type));
}

}  // namespace ballast::tiers
