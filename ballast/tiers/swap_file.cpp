#include "ballast/tiers/swap_file.h"

#include <exception>
#include <string>

#include "ballast/base/checksum.h"
#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/tiers/transfers.h"

namespace ballast::tiers {
namespace {

enum class Activity : std::uint8_t { kNone, kReading, kWriting };

struct Extent {
  std::int64_t offset = 0, bytes = 0;  // padded
  Activity activity = Activity::kNone;
  std::span<const std::byte> reading;  // the buffer to check
  std::uint64_t written = 0;           // checksum of what was last written
  bool ever_written = false;
};

std::vector<Extent> lay_out(const std::vector<std::int64_t>& extent_bytes) {
  std::vector<Extent> extents;
  std::int64_t end = 0;
  for (const std::int64_t bytes : extent_bytes) {
    extents.push_back({.offset = end, .bytes = round_up(bytes, kDiskAlign)});
    end += extents.back().bytes;
  }
  return extents;
}

}  // namespace

struct SwapFile::Impl {
  Impl(const std::filesystem::path& path, const std::vector<std::int64_t>& extent_bytes, const DiskOptions& options,
       int rank)
      : extents(lay_out(extent_bytes)),
        file(path, extents.empty() ? 0 : extents.back().offset + extents.back().bytes, rank),
        transfers(file, options) {}

  /// What may throw an IoError: the first one ends the file.
  template <class Fn>
  void guarded(Fn fn) {
    if (cause) std::rethrow_exception(cause);
    try {
      fn();
    } catch (const IoError&) {
      cause = std::current_exception();
      transfers.drain();
      throw;
    }
  }

  Extent& at(const char* operation, int number) {
    if (number < 0 || number >= static_cast<int>(extents.size()))
      throw UseError(operation, "no such extent (", number, " of ", extents.size(), ", ", file.path().string(), ")");
    return extents[static_cast<std::size_t>(number)];
  }

  Extent& ready(const char* operation, int number, std::span<const std::byte> buffer) {
    if (cause) std::rethrow_exception(cause);
    Extent& extent = at(operation, number);
    check_eq<UseError>(operation, "wrong buffer length", static_cast<std::int64_t>(buffer.size()), extent.bytes,
                       "bytes; extent ", number, ", ", file.path().string());
    if (reinterpret_cast<std::uintptr_t>(buffer.data()) % kDiskAlign != 0)
      throw UseError(operation, "the buffer isn't aligned (to ", kDiskAlign, " bytes; extent ", number, ")");
    if (extent.activity == Activity::kReading)
      throw UseError(operation, "the extent is being read (extent ", number, "; call finish() first)");
    return extent;
  }

  void finish(int number) {
    Extent& extent = at("tiers.finish", number);
    guarded([&] {
      transfers.wait(number);
      const Activity ended = std::exchange(extent.activity, Activity::kNone);
      if (ended != Activity::kReading) return;
      const std::uint64_t got = checksum(extent.reading, [this] { transfers.pump(); });
      if (got != extent.written) {
        throw IoError("tiers.read", "the data is not what was written (", file.path().string(), ", chunk ", number,
                      " at byte ", extent.offset, ", ", extent.bytes, " bytes; checksum got ", checksum_text(got),
                      ", want ", checksum_text(extent.written), "; rank ", file.rank(),
                      "; nothing but this run may write there, else check the disk or choose another nvme_path)");
      }
    });
  }

  std::vector<Extent> extents;
  DiskFile file;        // outlives the queue in transfers
  Transfers transfers;  // its queue's destructor waits for what is in flight
  std::exception_ptr cause;
};

SwapFile::SwapFile(const std::filesystem::path& file, const std::vector<std::int64_t>& extent_bytes,
                   const DiskOptions& options, int rank)
    : impl_(std::make_unique<Impl>(file, extent_bytes, options, rank)) {}

SwapFile::~SwapFile() = default;

int SwapFile::extents() const noexcept { return static_cast<int>(impl_->extents.size()); }
std::int64_t SwapFile::padded_bytes(int extent) const { return impl_->at("tiers.padded_bytes", extent).bytes; }
std::int64_t SwapFile::bytes() const noexcept { return impl_->file.bytes(); }

bool SwapFile::register_buffers(const std::vector<std::span<std::byte>>& buffers) {
  finish_all();
  return impl_->transfers.queue().register_buffers(buffers);
}

void SwapFile::start_read(int number, std::span<std::byte> to) {
  Extent& extent = impl_->ready("tiers.start_read", number, to);
  if (!extent.ever_written) throw UseError("tiers.start_read", "the extent was never written (extent ", number, ")");
  if (extent.activity == Activity::kWriting) finish(number);
  impl_->guarded([&] {
    extent.activity = Activity::kReading;
    extent.reading = to;
    impl_->transfers.start(number, DiskOp::kRead, extent.offset, to);
  });
}

void SwapFile::start_write(int number, std::span<const std::byte> from) {
  Extent& extent = impl_->ready("tiers.start_write", number, from);
  if (extent.activity == Activity::kWriting) finish(number);
  impl_->guarded([&] {
    extent.activity = Activity::kWriting;
    // A write only reads its buffer; the queue has one kind of request for both.
    impl_->transfers.start(number, DiskOp::kWrite, extent.offset, {const_cast<std::byte*>(from.data()), from.size()});
    extent.written = checksum(from, [this] { impl_->transfers.pump(); });  // while the disk works
    extent.ever_written = true;
  });
}

void SwapFile::finish(int extent) { impl_->finish(extent); }

void SwapFile::finish_all() {
  for (int extent = 0; extent < extents(); ++extent) {
    if (impl_->extents[static_cast<std::size_t>(extent)].activity != Activity::kNone) finish(extent);
  }
  impl_->guarded([] {});
}

void SwapFile::pump() {
  impl_->guarded([&] { impl_->transfers.pump(); });
}

}  // namespace ballast::tiers
