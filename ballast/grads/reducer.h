#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "ballast/comm/communicator.h"
#include "ballast/comm/rounds.h"
#include "ballast/grads/gradient_store.h"
#include "ballast/grads/policy.h"
#include "ballast/layout/layout.h"
#include "ballast/tiers/device_span.h"

namespace ballast {

/// What all ranks know after a round, equal on all of them.
struct Agreed {
  bool all_arrived = false;         // every rank is in the same call
  bool any_backward = false;        // some rank has run a backward since the last step()
  std::int64_t most_backwards = 0;  // of any rank in this window
  double weight = 0;                // sum over ranks, in rank order
  std::uint32_t scaling = 0;        // Window::Scaling of the ranks that have run a backward
  bool same_settings = true;        // of all ranks in this round
  std::size_t furthest = 0;         // units that some rank had started when it spoke
  std::vector<bool> active;         // by parameter: some rank has a contribution in this window
};

/// What one rank says of its window in a round, next to the counts in Rounds.
struct Announcement {
  bool reduce = false;  // this rank wants what is held to be reduced in this round
  bool ends_window = false;
  bool backward_since_step = false;
  std::uint32_t scaling = 0;
  double weight = 0;
  std::uint64_t settings = 0;  // digest of what the caller must have set alike on all ranks
};

/// Moves contributions from where each rank holds them whole to the sum over ranks: all-to-all in the dtype they came
/// in, summed in fp32 in rank order. Units go in one fixed order, last of the forward first. During a backward a unit
/// may start as soon as it is complete, if all before it in the order have; a round at the end tells every rank what
/// the others have started and still hold, and all of them reduce that, with zeros where a rank has nothing. So ranks
/// that took other branches neither hang nor mix up units.
///
/// Called from the caller's thread and, in on_gradient, from autograd's while the caller waits in backward: never two
/// at once, and autograd's own queues order them.
class Reducer {
 public:
  Reducer(const Layout& layout, const GradPolicy& policy, GradientStore& store, c10::Device device,
          std::shared_ptr<Communicator> reduce, Rounds& rounds, std::shared_ptr<Ledger> ledger);

  /// Bits that the rounds' messages need.
  static std::int64_t bits(const Layout& layout);

  /// deferred: contributions stay here, whatever the stage (no_sync, coalesce_grad_reduction).
  void begin_backward(bool deferred) { deferred_ = deferred; }
  void on_gradient(int parameter, at::Tensor gradient);
  /// Does the end of this backward reduce? Then a round follows.
  bool reduces_at_backward() const { return policy_.reduce_every_backward && !deferred_; }

  /// One meeting of all ranks, and the reductions that it agrees on. Collective. When it returns, they have landed.
  /// unit: where the call is about one; must be equal on the ranks that are in it.
  Agreed round(Call call, const Announcement& mine, int unit = 0);

  /// fp32 [shard or padded], on the device: the sum over ranks of what the unit has so far, landed and held, without
  /// moving anything. Collective. Undefined where no rank has any.
  /// An IoError on this rank comes after its part in the others' reads.
  at::Tensor peek(int unit);

  /// Before a window is dropped on purpose. Backwards that an exception ended may have started more units on one rank
  /// than on another: all ranks come level, or each later reduction would meet another unit's. Collective.
  void come_level(const Announcement& mine);
  /// Forgets what was started, after an error or with a dropped window.
  void abandon() noexcept;

 private:
  struct InFlight {
    int unit;
    std::int64_t elements;
    at::Tensor sent, received;
    PendingCollective transfer;
    Ledger::Entry bytes;
    tiers::DeviceMark launched;
  };

  bool may_start_early(int unit) const;
  c10::ScalarType travel_dtype(int unit, bool mixed) const;
  void start(int unit, c10::ScalarType dtype, at::Tensor contributions);
  bool make_way_early(std::int64_t elements);
  void land_oldest();
  at::Tensor whole(const at::Tensor& shard, const Unit& unit);
  AgreementMessage message(const Announcement& mine) const;
  void reduce_agreed(const std::vector<AgreementMessage>& all);

  const Layout& layout_;
  GradPolicy policy_;
  GradientStore& store_;
  c10::Device device_;
  std::shared_ptr<Communicator> reduce_;
  Rounds& rounds_;
  std::shared_ptr<Ledger> ledger_;
  std::vector<int> order_;   // trainable units, in the order of reduction
  std::size_t started_ = 0;  // of order_, in this backward
  bool deferred_ = false;
  std::deque<InFlight> in_flight_;
  std::int64_t in_flight_elements_ = 0;
};

}  // namespace ballast
