#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ballast/base/ledger.h"
#include "ballast/grads/arithmetic.h"
#include "ballast/tiers/device_stream.h"
#include "ballast/tiers/host_arena.h"
#include "ballast/tiers/host_lane.h"

namespace ballast {

/// Sums over ranks that rest in host memory between backwards. What lands is copied from the device on a stream of its
/// own through two staging slots and added by the host lane. The caller goes on at once: it may run ahead of the lane
/// by `in_flight` elements, whose device memory waits for its copy, and is held up only beyond that. Squares are added
/// up on the way, so that the norm costs no pass of its own.
class HostSums {
 public:
  struct Options {
    c10::ScalarType accumulate = c10::kFloat;
    bool pin_memory = false;                     // staging slots, next to a device
    std::int64_t in_flight = 0;                  // elements that wait for the lane at most; one sum may exceed it
    std::int64_t piece = std::int64_t{8} << 20;  // elements copied and added at once; a multiple of kSquaresChunk
    std::vector<std::string> names;              // of the units, for the trace
  };

  /// sizes: elements by unit, 0 where the unit's sum is not kept here. All memory is allocated now. ranges: equal
  /// slices of a sum whose squares are added up apart, one a rank where every rank keeps the whole.
  HostSums(std::vector<std::int64_t> sizes, int ranges, c10::Device device, const Options& options,
           tiers::HostLane& lane, const std::shared_ptr<Ledger>& ledger);

  /// What its staging slots take of the host's memory.
  static std::int64_t staging_bytes(const std::vector<std::int64_t>& sizes, c10::DeviceType device,
                                    const Options& options);

  bool keeps(int unit) const { return units_[static_cast<std::size_t>(unit)].sum.defined(); }

  /// Adds `sum` [size], on the device, any dtype, to what landed before; with `first`, to nothing.
  void land(int unit, const at::Tensor& sum, bool first);
  /// The unit's sum once all that landed is in it: [size] on the host. Valid until the next land().
  const at::Tensor& landed(int unit);
  /// The same memory for jobs that are queued on the lane, which come after what has landed so far.
  const at::Tensor& memory(int unit) const { return units_[static_cast<std::size_t>(unit)].sum; }
  /// Adds the squares of what landed(unit) returns to ranks first_rank, first_rank + 1, ...
  void add_squares(int unit, SquareSums& squares, int first_rank);
  /// landed(unit) was written to.
  void written(int unit);

 private:
  static constexpr int kSlots = 2;
  struct UnitSum {
    at::Tensor sum;
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
    int range;
    std::int64_t begin;  // in its range
    at::Tensor values;
    tiers::DeviceEvent copied;
  };

  UnitSum& at(int unit) { return units_[static_cast<std::size_t>(unit)]; }

  std::string_view name(int unit) const;
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
  std::array<at::Tensor, kSlots> slots_;  // bytes, the lane's; none where the device is the host
  Ledger::Entry staging_bytes_;
};

}  // namespace ballast
