#include "ballast/grads/host_sums.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/math.h"
#include "ballast/base/trace.h"
#include "ballast/tiers/device_span.h"

namespace ballast {

HostSums::HostSums(std::vector<std::int64_t> sizes, int ranges, c10::Device device, const Options& options,
                   tiers::HostLane& lane, const std::shared_ptr<Ledger>& ledger)
    : ranges_(ranges), device_(device), options_(options), lane_(lane), copies_(device), units_(sizes.size()) {
  std::int64_t total = 0;
  for (std::int64_t size : sizes) total += tiers::HostArena::bytes_of(size, options.accumulate);
  tiers::HostArena arena(options.swap ? 0 : total, false, device);  // only the staging slots are copied to
  int extent = 0;
  for (std::size_t u = 0; u < sizes.size(); ++u) {
    UnitSum& mine = units_[u];
    mine.size = sizes[u];
    if (mine.size == 0) continue;
    mine.squares.assign(
        static_cast<std::size_t>(ranges),
        std::vector<double>(static_cast<std::size_t>(ceil_div(sizes[u] / ranges, kernels::kSquaresChunk))));
    mine.first_extent = extent;
    extent += static_cast<int>(pieces(static_cast<int>(u)));
    if (options.swap) continue;
    mine.sum = arena.allocate(sizes[u], options.accumulate);
    mine.bytes = ledger->track(MemoryKind::kGrads, Tier::kHost, static_cast<std::int64_t>(mine.sum.nbytes()));
  }
  if (options.swap && extent > 0) {
    // On the lane, as all later use: a disk queue belongs to the thread that drives it.
    lane_.run([&] {
      on_disk_.emplace("gradients.swap", extents(sizes, ranges, options), *options.swap, c10::kCPU, options.rank);
    });
    ring_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, on_disk_->bytes().buffers);
    disk_bytes_ = ledger->track(MemoryKind::kGrads, Tier::kNvme, on_disk_->bytes().file);
  }
  const std::int64_t staged = staging_bytes(sizes, device.type(), options);
  if (staged == 0) return;
  tiers::HostArena staging(kSlots * tiers::HostArena::bytes_of(staged / kSlots, at::kByte), options.pin_memory, device);
  for (at::Tensor& bytes : slots_) bytes = staging.allocate(staged / kSlots, at::kByte);
  staging_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, staged);
}

std::vector<std::int64_t> HostSums::extents(const std::vector<std::int64_t>& sizes, int ranges,
                                            const Options& options) {
  const auto element = static_cast<std::int64_t>(c10::elementSize(options.accumulate));
  std::vector<std::int64_t> bytes;
  for (const std::int64_t size : sizes)
    for (int r = 0; r < ranges; ++r)
      for (std::int64_t begin = 0; begin < size / ranges; begin += options.piece)
        bytes.push_back(element * std::min(options.piece, size / ranges - begin));
  return bytes;
}

std::int64_t HostSums::pieces_a_range(int unit) const { return ceil_div(at(unit).size / ranges_, options_.piece); }

Range HostSums::piece(int unit, std::int64_t index) const {
  const std::int64_t range = at(unit).size / ranges_, pieces = pieces_a_range(unit);
  const std::int64_t begin = index % pieces * options_.piece, offset = index / pieces * range;
  return {offset + begin, offset + std::min(begin + options_.piece, range)};
}

std::int64_t HostSums::piece_of(int unit, std::int64_t element) const {
  const std::int64_t range = at(unit).size / ranges_;
  return element / range * pieces_a_range(unit) + element % range / options_.piece;
}

double* HostSums::squares_of(int unit, std::int64_t index) {
  const std::int64_t pieces = pieces_a_range(unit);
  return at(unit).squares[static_cast<std::size_t>(index / pieces)].data() +
         index % pieces * options_.piece / kernels::kSquaresChunk;
}

// first: nothing has landed there in this window; all of it is going to be written.
at::Tensor HostSums::open(int unit, std::int64_t index, bool first) {
  const Range range = piece(unit, index);
  if (!on_disk_) return at(unit).sum.narrow(0, range.begin, range.size());
  const int extent = at(unit).first_extent + static_cast<int>(index);
  return (first ? on_disk_->open_zeros(extent) : on_disk_->open(extent)).view(options_.accumulate);
}

void HostSums::close(int unit, std::int64_t index, bool changed) {
  if (on_disk_) on_disk_->close(at(unit).first_extent + static_cast<int>(index), changed);
}

std::int64_t HostSums::staging_bytes(const std::vector<std::int64_t>& sizes, c10::DeviceType device,
                                     const Options& options) {
  if (device == c10::DeviceType::CPU || sizes.empty()) return 0;
  const std::int64_t slot = std::min(options.piece, *std::max_element(sizes.begin(), sizes.end()));
  return kSlots * slot * 4;
}

void HostSums::land(int unit, const at::Tensor& sum, bool first) {
  UnitSum& mine = at(unit);
  while (!flights_.empty() && in_flight_ + sum.numel() > options_.in_flight) {
    lane_.wait(flights_.front().ticket, "room for the gradient of", name(unit));
    in_flight_ -= flights_.front().elements;
    flights_.pop_front();
  }
  const auto computed = tiers::DeviceStream::mark_current(device_);
  auto job = [this, unit, sum, first, computed] {
    copies_.wait_for(computed);
    Piece next = fetch(unit, sum, 0);
    for (std::int64_t i = 0; i < pieces(unit); ++i) {
      const Piece piece = std::move(next);
      if (i + 1 < pieces(unit)) next = fetch(unit, sum, i + 1);  // travels while this one is added
      add(unit, piece, first);
    }
  };
  mine.last = lane_.submit(std::move(job), "gradients");
  flights_.push_back({mine.last, sum.numel()});
  in_flight_ += sum.numel();
}

std::string_view HostSums::name(int unit) const {
  return options_.names.empty() ? std::string_view() : options_.names[static_cast<std::size_t>(unit)];
}

HostSums::Piece HostSums::fetch(int unit, const at::Tensor& sum, std::int64_t index) {
  const Range range = piece(unit, index);
  Piece piece{index, sum.narrow(0, range.begin, range.size()), {}};
  if (device_.is_cpu()) return piece;
  const at::Tensor on_device = piece.values;
  piece.values = slots_[static_cast<std::size_t>(index) % slots_.size()]
                     .narrow(0, 0, static_cast<std::int64_t>(on_device.nbytes()))
                     .view(on_device.scalar_type());
  const tiers::DeviceStream::Scope on(copies_);
  const tiers::DeviceSpan copy(trace::Lane::kCopies, "to the host: gradient of", name(unit), device_);
  piece.values.copy_(on_device, /*non_blocking=*/true);
  piece.copied = copies_.mark();
  return piece;
}

void HostSums::add(int unit, const Piece& piece, bool first) {
  if (!device_.is_cpu()) {
    const trace::Span wait(trace::Lane::kHostWaits, "copy of", name(unit));
    piece.copied.synchronize();
  }
  const at::Tensor sum = open(unit, piece.index, first);
  if (on_disk_ && !first && piece.index + 1 < pieces(unit))
    on_disk_->expect(at(unit).first_extent + static_cast<int>(piece.index) + 1);
  {
    const trace::Span work(trace::Lane::kHostAdd, first ? "first gradient of" : "gradient of", name(unit));
    kernels::land(sum.mutable_data_ptr(), scalar_of(sum), piece.values.const_data_ptr(), scalar_of(piece.values), first,
                  piece.values.numel(), squares_of(unit, piece.index), lane_.threads());
  }
  close(unit, piece.index, /*changed=*/true);
}

at::Tensor HostSums::landed(int unit) {
  lane_.wait(at(unit).last, "gradient of", name(unit));
  at::Tensor sum;
  lane_.run([&] {
    read(unit, {0, at(unit).size}, [&](const at::Tensor& values) { sum = on_disk_ ? values.clone() : values; });
  });
  return sum;
}

void HostSums::add_squares(int unit, SquareSums& squares, int first_rank) {
  lane_.wait(at(unit).last, "gradient of", name(unit));
  for (int r = 0; r < ranges_; ++r) {
    double sum = 0;
    for (double chunk : at(unit).squares[static_cast<std::size_t>(r)]) sum += chunk;
    squares.add(first_rank + r, sum);
  }
}

void HostSums::write(int unit, Range elements, const at::Tensor& values, bool first) {
  const at::Tensor on_host = values.cpu();
  lane_.run([&] {
    for (std::int64_t index = 0; index < pieces(unit); ++index) {
      const Range range = piece(unit, index), part = intersect(range, elements);
      if (part.empty() && !first) continue;
      const at::Tensor sum = open(unit, index, first);
      if (first) sum.zero_();
      if (!part.empty())
        sum.narrow(0, part.begin - range.begin, part.size())
            .copy_(on_host.narrow(0, part.begin - elements.begin, part.size()));
      for (std::int64_t begin = 0; begin < range.size(); begin += kernels::kSquaresChunk) {
        const at::Tensor slice = sum.narrow(0, begin, std::min(kernels::kSquaresChunk, range.size() - begin));
        squares_of(unit, index)[begin / kernels::kSquaresChunk] =
            kernels::sum_squares(slice.const_data_ptr(), scalar_of(slice), slice.numel(), 1);
      }
      close(unit, index, /*changed=*/true);
    }
  });
}

void HostSums::read(int unit, Range range, const std::function<void(const at::Tensor&)>& body) {
  UnitSum& mine = at(unit);
  if (!on_disk_) return body(mine.sum.narrow(0, range.begin, range.size()));
  const std::int64_t first = piece_of(unit, range.begin), last = piece_of(unit, range.end - 1);
  if (first == last) {
    const at::Tensor sum = open(unit, first, false);
    // In the order of updates, which is that of units and of the elements in them.
    if (const int next = mine.first_extent + static_cast<int>(first) + 1; next < on_disk_->extents())
      on_disk_->expect(next);
    body(sum.narrow(0, range.begin - piece(unit, first).begin, range.size()));
    close(unit, first, /*changed=*/false);
    return;
  }
  const at::Tensor all = at::empty({range.size()}, options_.accumulate);
  for (std::int64_t index = first; index <= last; ++index) {
    const Range here = piece(unit, index), part = intersect(here, range);
    const at::Tensor sum = open(unit, index, false);
    all.narrow(0, part.begin - range.begin, part.size()).copy_(sum.narrow(0, part.begin - here.begin, part.size()));
    close(unit, index, /*changed=*/false);
  }
  body(all);
}

void LandedSum::read(Range range, const std::function<void(const at::Tensor&)>& body) const {
  if (host_ != nullptr) return host_->read(unit_, range, body);
  body(sum_.narrow(0, range.begin, range.size()));
}

}  // namespace ballast
