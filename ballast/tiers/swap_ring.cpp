#include "ballast/tiers/swap_ring.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/base/trace.h"
#include "ballast/tiers/disk_file.h"
#include "ballast/tiers/host_arena.h"

namespace ballast::tiers {
namespace {

// More than one for each extent would never be used.
int buffers_of(std::size_t extents, int wanted) { return std::min(wanted, std::max(2, static_cast<int>(extents))); }

}  // namespace

SwapRing::Bytes SwapRing::bytes_of(const std::vector<std::int64_t>& extent_bytes, int buffers) {
  Bytes bytes;
  std::int64_t longest = 0;
  for (const std::int64_t extent : extent_bytes) {
    const std::int64_t padded = round_up(extent, kDiskAlign);
    bytes.file += padded;
    longest = std::max(longest, padded);
  }
  bytes.buffers = buffers_of(extent_bytes.size(), buffers) * longest;
  return bytes;
}

SwapRing::SwapRing(const std::string& name, const std::vector<std::int64_t>& extent_bytes, const SwapOptions& options,
                   c10::Device device, int rank)
    : name_(name),
      rank_(rank),
      extent_bytes_(extent_bytes),
      options_(options),
      bytes_(bytes_of(extent_bytes, options.buffers)),
      folder_(options.nvme_path, rank),
      file_(folder_.path() / name, extent_bytes, options.disk, rank),
      written_(extent_bytes.size(), false) {
  const int buffers = buffers_of(extent_bytes.size(), options.buffers);
  const std::int64_t longest = bytes_.buffers / buffers;
  HostArena arena(buffers * HostArena::bytes_of(longest, at::kByte), options.pin_memory, device);
  for (int b = 0; b < buffers; ++b) buffers_.push_back({arena.allocate(longest, at::kByte)});
  register_buffers();
}

SwapRing::SwapRing(SwapRing& beside)
    : name_(beside.name_),
      rank_(beside.rank_),
      extent_bytes_(beside.extent_bytes_),
      options_(beside.options_),
      bytes_(beside.bytes_),
      folder_(options_.nvme_path, rank_),
      file_(folder_.path() / name_, extent_bytes_, options_.disk, rank_),
      written_(extent_bytes_.size(), false) {
  beside.forget_buffers();
  for (const Buffer& buffer : beside.buffers_) buffers_.push_back({buffer.bytes});
  register_buffers();
}

void SwapRing::register_buffers() {
  std::vector<std::span<std::byte>> spans;
  for (const Buffer& buffer : buffers_)
    spans.push_back({static_cast<std::byte*>(buffer.bytes.mutable_data_ptr()), buffer.bytes.nbytes()});
  file_.register_buffers(spans);
}

void SwapRing::forget_buffers() {
  finish();
  for (Buffer& buffer : buffers_) {
    buffer.read_until.synchronize();
    buffer = {buffer.bytes};
  }
}

std::span<std::byte> SwapRing::memory(const Buffer& buffer, int extent) const {
  return {static_cast<std::byte*>(buffer.bytes.mutable_data_ptr()),
          static_cast<std::size_t>(file_.padded_bytes(extent))};
}

void SwapRing::wait(int extent) {
  const std::string name = trace::on() ? std::to_string(extent) : std::string();
  const trace::Span span(trace::Lane::kHostWaits, "chunk", name);
  file_.finish(extent);
}

SwapRing::Buffer* SwapRing::find(int extent) {
  const auto found =
      std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.extent == extent; });
  return found == buffers_.end() ? nullptr : &*found;
}

// Promises are broken only where there is nothing else, the oldest first: a guess may have been wrong.
SwapRing::Buffer* SwapRing::oldest(bool also_promised) {
  Buffer* buffer = nullptr;
  for (Buffer& b : buffers_) {
    if (b.state == State::kOpen || (b.state == State::kPromised && !also_promised)) continue;
    const auto rank = [](const Buffer& x) { return std::pair(x.state == State::kPromised, x.used); };
    if (buffer == nullptr || rank(b) < rank(*buffer)) buffer = &b;
  }
  return buffer;
}

void SwapRing::take(Buffer& buffer, int extent) {
  if (buffer.extent >= 0) wait(buffer.extent);  // its write, or a read that nobody came for
  buffer.read_until.synchronize();
  buffer.read_until = {};
  buffer.extent = extent;
  buffer.used = ++clock_;
}

void SwapRing::read(Buffer& buffer) {
  const std::span<std::byte> to = memory(buffer, buffer.extent);
  if (written_[static_cast<std::size_t>(buffer.extent)]) {
    file_.start_read(buffer.extent, to);
  } else {
    std::memset(to.data(), 0, to.size());
  }
}

at::Tensor SwapRing::hand_out(Buffer& buffer) {
  wait(buffer.extent);  // for its read; or its write, which has the same bytes
  buffer.read_until.synchronize();
  buffer.state = State::kOpen;
  buffer.used = ++clock_;
  return buffer.bytes.narrow(0, 0, extent_bytes_[static_cast<std::size_t>(buffer.extent)]);
}

SwapRing::Buffer& SwapRing::buffer_of(int extent, bool filled) {
  if (Buffer* buffer = find(extent)) return *buffer;
  Buffer* buffer = oldest(/*also_promised=*/true);
  if (buffer == nullptr) throw UseError("tiers.open", "all buffers of the ring are open (", buffers_.size(), ")");
  take(*buffer, extent);
  if (filled) read(*buffer);
  return *buffer;
}

at::Tensor SwapRing::open(int extent) { return hand_out(buffer_of(extent, /*filled=*/true)); }

at::Tensor SwapRing::open_zeros(int extent) {
  const at::Tensor bytes = open_new(extent);
  std::memset(bytes.mutable_data_ptr(), 0, bytes.nbytes());
  return bytes;
}

// What pads it on disk is zeros always.
at::Tensor SwapRing::open_new(int extent) {
  Buffer& buffer = buffer_of(extent, /*filled=*/false);
  const at::Tensor bytes = hand_out(buffer);
  const std::span<std::byte> padding = memory(buffer, extent).subspan(bytes.nbytes());
  std::memset(padding.data(), 0, padding.size());
  return bytes;
}

void SwapRing::close(int extent, bool changed, DeviceEvent read_until) {
  Buffer& buffer = *find(extent);
  buffer.state = State::kKept;
  buffer.read_until = std::move(read_until);
  if (!changed) return;
  file_.start_write(extent, memory(buffer, extent));
  written_[static_cast<std::size_t>(extent)] = true;
  if (!options_.write_behind) wait(extent);
}

void SwapRing::expect(int extent) {
  if (options_.read_ahead) {
    if (Buffer* buffer = find(extent)) {
      if (buffer->state == State::kKept) buffer->state = State::kPromised;
      buffer->used = ++clock_;
    } else if (Buffer* free = oldest(/*also_promised=*/false)) {
      take(*free, extent);
      free->state = State::kPromised;
      read(*free);
    }
  }
  file_.pump();
}

}  // namespace ballast::tiers
