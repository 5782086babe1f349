#include "ballast/grads/host_sums.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/math.h"
#include "ballast/base/trace.h"

namespace ballast {

HostSums::HostSums(std::vector<std::int64_t> sizes, int ranges, c10::Device device, const Options& options,
                   tiers::HostLane& lane, const std::shared_ptr<Ledger>& ledger)
    : ranges_(ranges), device_(device), options_(options), lane_(lane), copies_(device), units_(sizes.size()) {
  std::int64_t total = 0, longest = 0;
  for (std::int64_t size : sizes) {
    total += tiers::HostArena::bytes_of(size, options.accumulate);
    longest = std::max(longest, size);
  }
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
  if (device.is_cpu()) return;
  const std::int64_t slot = std::min(options.piece, longest);
  tiers::HostArena staging(kSlots * tiers::HostArena::bytes_of(slot, at::kFloat), options.pin_memory, device);
  for (Slot& s : slots_) s.memory = staging.allocate(slot * 4, at::kByte);
  staging_bytes_ = ledger->track(MemoryKind::kStaging, Tier::kHost, kSlots * slot * 4);
}

void HostSums::land(int unit, const at::Tensor& sum, bool first) {
  UnitSum& mine = at(unit);
  copies_.wait_for(tiers::DeviceStream::mark_current(device_));
  const std::int64_t range = mine.sum.numel() / ranges_;
  for (int r = 0; r < ranges_; ++r) {
    for (std::int64_t begin = 0; begin < range; begin += options_.piece) {
      const std::int64_t n = std::min(options_.piece, range - begin);
      Slot& slot = slots_[next_slot_++ % kSlots];
      lane_.wait(slot.busy_until);
      // Holds the whole sum's memory until the job has run, so that nobody else gets it while it is copied.
      const at::Tensor piece = sum.narrow(0, r * range + begin, n);
      at::Tensor on_host = piece;
      tiers::DeviceEvent copied;
      if (!piece.is_cpu()) {
        on_host = slot.memory.narrow(0, 0, static_cast<std::int64_t>(piece.nbytes())).view(piece.scalar_type());
        const tiers::DeviceStream::Scope on(copies_);
        on_host.copy_(piece, /*non_blocking=*/true);
        copied = copies_.mark();
      }
      slot.busy_until = mine.last = lane_.submit([this, &mine, first, piece, on_host, copied, r, range, begin, n] {
        {
          const trace::Span span("copies", "waits for a gradient");
          copied.synchronize();
        }
        const trace::Span span("host", first ? "first gradient" : "add gradient");
        const auto acc = scalar_of(mine.sum);
        auto* to = static_cast<std::byte*>(mine.sum.mutable_data_ptr()) +
                   (r * range + begin) * static_cast<std::int64_t>(mine.sum.element_size());
        double* squares = mine.squares[static_cast<std::size_t>(r)].data() + begin / kernels::kSquaresChunk;
        kernels::land(to, acc, on_host.const_data_ptr(), scalar_of(on_host), first, n, squares, lane_.threads());
      });
    }
  }
}

const at::Tensor& HostSums::landed(int unit) {
  lane_.wait(at(unit).last);
  return at(unit).sum;
}

void HostSums::add_squares(int unit, SquareSums& squares, int first_rank) {
  lane_.wait(at(unit).last);
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
