#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/grads/arithmetic.h"
#include "ballast/layout/layout.h"
#include "ballast/tiers/device_stream.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/host_lane.h"
#include "ballast/tiers/swap_ring.h"

namespace ballast {

/// Sums over ranks that rest off the device between backwards: in host memory, or on disk in pieces. What lands is
/// copied from the device on a stream of its own through two staging slots and added by the host lane. The caller goes
/// on at once: it may run ahead of the lane by `in_flight` elements, whose device memory waits for its copy, and is
/// held up only beyond that. Squares are added up on the way, so that the norm costs no pass of its own.
class HostSums {
 public:
  struct Options {
    c10::ScalarType accumulate = c10::kFloat;
    bool pin_memory = false;                     // staging slots, next to a device
    std::int64_t in_flight = 0;                  // elements that wait for the lane at most; one sum may exceed it
    std::int64_t piece = std::int64_t{8} << 20;  // elements copied and added at once; a multiple of kSquaresChunk
    std::vector<std::string> names;              // of the units, for the trace
    std::optional<tiers::SwapOptions> swap;      // on disk
    int rank = 0;
  };

  /// sizes: elements by unit, 0 where the unit's sum is not kept here. All memory is allocated now, and the file.
  /// ranges: equal slices of a sum whose squares are added up apart, one a rank where every rank keeps the whole.
  HostSums(std::vector<std::int64_t> sizes, int ranges, c10::Device device, const Options& options,
           tiers::HostLane& lane, const std::shared_ptr<Ledger>& ledger);

  /// What its staging slots take of the host's memory.
  static std::int64_t staging_bytes(const std::vector<std::int64_t>& sizes, c10::DeviceType device,
                                    const Options& options);
  /// The bytes of its pieces on disk.
  static std::vector<std::int64_t> extents(const std::vector<std::int64_t>& sizes, int ranges, const Options& options);

  bool keeps(int unit) const { return at(unit).size > 0; }

  /// Adds `sum` [size], on the device, any dtype, to what landed before; with `first`, to nothing.
  void land(int unit, const at::Tensor& sum, bool first);
  /// The unit's sum once all that landed is in it: [size] on the host, valid until the next land().
  at::Tensor landed(int unit);
  /// Adds the squares of what landed(unit) returns to ranks first_rank, first_rank + 1, ...
  void add_squares(int unit, SquareSums& squares, int first_rank);
  /// Replaces elements of the sum, with `first` of zeros. values: [elements.size()].
  void write(int unit, Range elements, const at::Tensor& values, bool first);

  /// Ends what the lane's thread drives, on that thread. Nothing may be called afterwards.
  void close() { on_disk_.reset(); }

  /// For jobs that are queued on the lane, which come after what has landed so far: body(the sum's elements in
  /// `range`).
  void read(int unit, Range range, const std::function<void(const at::Tensor&)>& body);

 private:
  static constexpr int kSlots = 2;
  struct UnitSum {
    std::int64_t size = 0;
    at::Tensor sum;                            // in host memory
    int first_extent = 0;                      // on disk: of its first piece
    std::vector<std::vector<double>> squares;  // by range, by kSquaresChunk elements; the lane's until `last` has run
    tiers::HostLane::Ticket last = 0;
    Ledger::Entry bytes;
  };
  /// A sum on its way: the lane's job keeps its device memory.
  struct Flight {
    tiers::HostLane::Ticket ticket;
    std::int64_t elements;
  };
  /// A piece of it, on the host once `copied` is reached.
  struct Piece {
    std::int64_t index;
    at::Tensor values;
    tiers::DeviceEvent copied;
  };

  UnitSum& at(int unit) { return units_[static_cast<std::size_t>(unit)]; }
  const UnitSum& at(int unit) const { return units_[static_cast<std::size_t>(unit)]; }

  std::string_view name(int unit) const;
  // Pieces are numbered within a unit; none crosses the end of a range.
  std::int64_t pieces_a_range(int unit) const;
  std::int64_t pieces(int unit) const { return ranges_ * pieces_a_range(unit); }
  Range piece(int unit, std::int64_t index) const;
  std::int64_t piece_of(int unit, std::int64_t element) const;
  double* squares_of(int unit, std::int64_t index);

  at::Tensor open(int unit, std::int64_t index, bool first);
  void close(int unit, std::int64_t index, bool changed);
  Piece fetch(int unit, const at::Tensor& sum, std::int64_t index);
  void add(int unit, const Piece& piece, bool first);

  const int ranges_;
  const c10::Device device_;
  const Options options_;
  tiers::HostLane& lane_;
  const tiers::DeviceStream copies_;
  std::vector<UnitSum> units_;
  std::deque<Flight> flights_;  // the caller's; oldest first
  std::int64_t in_flight_ = 0;
  std::array<at::Tensor, kSlots> slots_;    // bytes, the lane's; none where the device is the host
  std::optional<tiers::SwapRing> on_disk_;  // the lane's
  Ledger::Entry staging_bytes_, ring_bytes_, disk_bytes_;
};

/// A unit's landed sum as an update reads it: now, or later on the host lane.
class LandedSum {
 public:
  LandedSum() = default;  // none
  explicit LandedSum(at::Tensor sum) : sum_(std::move(sum)) {}
  LandedSum(HostSums& host, int unit) : host_(&host), unit_(unit) {}

  /// body(its elements in `range`), where they rest.
  void read(Range range, const std::function<void(const at::Tensor&)>& body) const;

 private:
  at::Tensor sum_;
  HostSums* host_ = nullptr;
  int unit_ = -1;
};

}  // namespace ballast
