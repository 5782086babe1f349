#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <thread>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/sync_point.h"
#include "ballast/tiers/disk_queue.h"

namespace ballast::tiers {
namespace {

constexpr std::size_t kLargestBuffer = std::size_t{1} << 30;  // the kernel's limit of one registered buffer
SyncPoint given_back;  // a ring's memory, soon another thread's ring: ThreadSanitizer misses liburing's system calls

class UringQueue final : public DiskQueue {
 public:
  UringQueue(io_uring ring, const DiskFile& file, int depth) : ring_(ring), file_(file), depth_(depth) {}

  ~UringQueue() override {
    while (in_flight_ > 0 && reap(true)) {
    }
    given_back.publish();
    ::io_uring_queue_exit(&ring_);
  }

  const char* name() const noexcept override { return "io_uring"; }
  int depth() const noexcept override { return depth_; }
  int in_flight() const noexcept override { return in_flight_; }

  void submit(std::span<const DiskRequest> requests) override {
    for (const DiskRequest& request : requests) prepare(request);
    int refusals = 0;
    while (::io_uring_sq_ready(&ring_) > 0) {
      const int taken = ::io_uring_submit(&ring_);
      if (taken > 0) {
        in_flight_ += taken;
      } else if (++refusals > kPatience || (taken < 0 && taken != -EINTR && taken != -EAGAIN && taken != -EBUSY)) {
        throw IoError("tiers.submit", "the kernel takes no requests: ", errno_text(-taken), " (", file_.path().string(),
                      ", ", in_flight_, " in flight, rank ", file_.rank(),
                      "; start again, or build with BALLAST_URING=OFF)");
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::optional<DiskCompletion> reap(bool wait) override {
    if (in_flight_ == 0) return std::nullopt;
    io_uring_cqe* entry = nullptr;
    int error = ::io_uring_peek_cqe(&ring_, &entry);
    while (wait && (error == -EAGAIN || error == -EINTR)) error = ::io_uring_wait_cqe(&ring_, &entry);
    if (error != 0) return std::nullopt;
    const DiskCompletion completion{.tag = entry->user_data, .result = entry->res};
    ::io_uring_cqe_seen(&ring_, entry);
    --in_flight_;
    return completion;
  }

  bool register_buffers(std::span<const std::span<std::byte>> buffers) override {
    if (!buffers_.empty()) ::io_uring_unregister_buffers(&ring_);
    buffers_.clear();
    for (std::span<std::byte> left : buffers) {
      while (!left.empty()) {
        const std::size_t bytes = std::min(left.size(), kLargestBuffer);
        buffers_.push_back({left.data(), bytes});
        left = left.subspan(bytes);
      }
    }
    std::sort(buffers_.begin(), buffers_.end(), [](const iovec& a, const iovec& b) { return a.iov_base < b.iov_base; });
    // Refused (ENOMEM) where the user may not lock that much memory: then every request pins its own pages.
    const bool registered =
        !buffers_.empty() &&
        ::io_uring_register_buffers(&ring_, buffers_.data(), static_cast<unsigned>(buffers_.size())) == 0;
    if (!registered) buffers_.clear();
    return registered;
  }

 private:
  static constexpr int kPatience = 10000;

  void prepare(const DiskRequest& request) {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    if (!entry) throw UseError("tiers.submit", "more requests than the queue holds (", depth_, ")");
    const auto bytes = static_cast<unsigned>(request.bytes);
    const auto offset = static_cast<std::uint64_t>(request.offset);
    const int buffer = buffer_of(request);
    if (request.op == DiskOp::kRead) {
      if (buffer >= 0) ::io_uring_prep_read_fixed(entry, file_.fd(), request.data, bytes, offset, buffer);
      if (buffer < 0) ::io_uring_prep_read(entry, file_.fd(), request.data, bytes, offset);
    } else {
      if (buffer >= 0) ::io_uring_prep_write_fixed(entry, file_.fd(), request.data, bytes, offset, buffer);
      if (buffer < 0) ::io_uring_prep_write(entry, file_.fd(), request.data, bytes, offset);
    }
    entry->user_data = request.tag;
  }

  /// The registered buffer that holds all of the request, or -1.
  int buffer_of(const DiskRequest& request) const noexcept {
    const auto after = std::upper_bound(buffers_.begin(), buffers_.end(), request.data,
                                        [](const std::byte* data, const iovec& b) { return data < b.iov_base; });
    if (after == buffers_.begin()) return -1;
    const iovec& buffer = *(after - 1);
    const std::byte* end = static_cast<const std::byte*>(buffer.iov_base) + buffer.iov_len;
    return request.data + request.bytes <= end ? static_cast<int>(after - 1 - buffers_.begin()) : -1;
  }

  io_uring ring_;
  const DiskFile& file_;
  const int depth_;
  int in_flight_ = 0;           // taken by the kernel and not reaped
  std::vector<iovec> buffers_;  // registered, by address
};

/// Kernels before 5.6 have rings without plain reads and writes.
bool reads_and_writes(io_uring& ring) {
  io_uring_probe* probe = ::io_uring_get_probe_ring(&ring);
  const bool both = probe && ::io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                    ::io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
  if (probe) ::io_uring_free_probe(probe);
  return both;
}

}  // namespace

std::unique_ptr<DiskQueue> make_uring_queue(const DiskFile& file, int depth, std::string& why_not) {
  io_uring ring{};
  if (const int error = ::io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0); error < 0) {
    why_not = "io_uring_setup: " + errno_text(-error);
    return nullptr;
  }
  given_back.observe();
  if (!reads_and_writes(ring)) {
    ::io_uring_queue_exit(&ring);
    why_not = "this kernel's io_uring is older than 5.6";
    return nullptr;
  }
  return std::make_unique<UringQueue>(ring, file, depth);
}

}  // namespace ballast::tiers
