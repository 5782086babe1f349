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
  tiers::HostArena arena(total, false, device);  // only the staging slots are copied to
  for (std::size_t u = 0; u < sizes.size(); ++u) {
    if (sizes[u] == 0) continue;
    UnitSum& mine = units_[u];
    mine.sum = arena.allocate(sizes[u], options.accumulate);
    mine.squares.assign(
        static_cast<std::size_t>(ranges),
        std::vector<double>(static_cast<std::size_t>(ceil_div(sizes[u] / ranges, kernels::kSquaresChunk))));
    mine.bytes = ledger->track(MemoryKind::kGrads, Tier::kHost, static_cast<std::int64_t>(mine.sum.nbytes()));
  }
  const std::int64_t staged = staging_bytes(sizes, device.type(), options);
  if (staged == 0) return;
  tiers::HostArena staging(kSlots * tiers::HostArena::bytes_of(staged / kSlots, at::kByte), options.pin_memory, device);
  for (at::Tensor& bytes : slots_) bytes = staging.allocate(staged / kSlots, at::kByte);
  staging_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, staged);
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
    const std::int64_t pieces = ranges_ * ceil_div(sum.numel() / ranges_, options_.piece);
    Piece next = fetch(unit, sum, 0);
    for (std::int64_t i = 0; i < pieces; ++i) {
      const Piece piece = std::move(next);
      if (i + 1 < pieces) next = fetch(unit, sum, i + 1);  // travels while this one is added
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
  const std::int64_t range = sum.numel() / ranges_, pieces = ceil_div(range, options_.piece);
  Piece piece;
  piece.range = static_cast<int>(index / pieces);
  piece.begin = index % pieces * options_.piece;
  piece.values = sum.narrow(0, piece.range * range + piece.begin, std::min(options_.piece, range - piece.begin));
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

void HostSums::add(int unit_id, const Piece& piece, bool first) {
  UnitSum& unit = at(unit_id);
  if (!device_.is_cpu()) {
    const trace::Span wait(trace::Lane::kHostWaits, "copy of", name(unit_id));
    piece.copied.synchronize();
  }
  const trace::Span work(trace::Lane::kHostAdd, first ? "first gradient of" : "gradient of", name(unit_id));
  const std::int64_t begin = piece.range * (unit.sum.numel() / ranges_) + piece.begin;
  auto* to =
      static_cast<std::byte*>(unit.sum.mutable_data_ptr()) + begin * static_cast<std::int64_t>(unit.sum.element_size());
  double* squares = unit.squares[static_cast<std::size_t>(piece.range)].data() + piece.begin / kernels::kSquaresChunk;
  kernels::land(to, scalar_of(unit.sum), piece.values.const_data_ptr(), scalar_of(piece.values), first,
                piece.values.numel(), squares, lane_.threads());
}

const at::Tensor& HostSums::landed(int unit) {
  lane_.wait(at(unit).last, "gradient of", name(unit));
  return at(unit).sum;
}

void HostSums::add_squares(int unit, SquareSums& squares, int first_rank) {
  lane_.wait(at(unit).last, "gradient of", name(unit));
  for (int r = 0; r < ranges_; ++r) {
    double sum = 0;
    for (double chunk : at(unit).squares[static_cast<std::size_t>(r)]) sum += chunk;
    squares.add(first_rank + r, sum);
  }
}

void HostSums::written(int unit) {
  UnitSum& mine = at(unit);
  const std::int64_t range = mine.sum.numel() / ranges_;
  for (int r = 0; r < ranges_; ++r)
    for (std::int64_t begin = 0; begin < range; begin += kernels::kSquaresChunk) {
      const at::Tensor slice = mine.sum.narrow(0, r * range + begin, std::min(kernels::kSquaresChunk, range - begin));
      mine.squares[static_cast<std::size_t>(r)][static_cast<std::size_t>(begin / kernels::kSquaresChunk)] =
          kernels::sum_squares(slice.const_data_ptr(), scalar_of(slice), slice.numel(), 1);
    }
}

}  // namespace ballast
