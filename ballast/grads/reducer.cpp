#include "ballast/grads/reducer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/error.h"
#include "ballast/base/math.h"
#include "ballast/grads/arithmetic.h"
#include "ballast/tiers/device_stream.h"

namespace ballast {
namespace {

// AgreementMessage::flags: bits 0-2 one flag each, 8-15 the scaling, 32-63 how many units this rank has started.
constexpr std::uint64_t kReduce = 1, kEndsWindow = 2, kBackwardSinceStep = 4;

std::size_t started_of(const AgreementMessage& message) { return static_cast<std::size_t>(message.flags >> 32); }
std::uint32_t scaling_of(const AgreementMessage& message) {
  return static_cast<std::uint32_t>((message.flags >> 8) & 0xff);
}

void set_bit(std::vector<std::uint64_t>& bits, std::size_t index) {
  bits[index / 64] |= std::uint64_t{1} << (index % 64);
}

}  // namespace

Reducer::Reducer(const Layout& layout, const GradPolicy& policy, GradientStore& store, c10::Device device,
                 std::shared_ptr<Communicator> reduce, Rounds& rounds, std::shared_ptr<Ledger> ledger)
    : layout_(layout),
      policy_(policy),
      store_(store),
      device_(device),
      reduce_(std::move(reduce)),
      rounds_(rounds),
      ledger_(std::move(ledger)) {
  for (auto unit = layout_.units.rbegin(); unit != layout_.units.rend(); ++unit)
    if (unit->trainable) order_.push_back(unit->id);
}

// Bitmap of a message: [held by unit][mixed by unit][active by parameter], whole words, and a word of settings.
std::int64_t Reducer::bits(const Layout& layout) {
  const auto flags = static_cast<std::int64_t>(2 * layout.units.size() + layout.parameters.size());
  return round_up(flags, 64) + 64;
}

void Reducer::on_gradient(int parameter, at::Tensor gradient) {
  store_.contribute(parameter, std::move(gradient));
  if (!reduces_at_backward() || !policy_.overlap) return;
  while (started_ < order_.size() && may_start_early(order_[started_])) {
    const int unit = order_[started_];
    if (!make_way_early(layout_.units[static_cast<std::size_t>(unit)].padded)) return;
    ++started_;
    start(unit, travel_dtype(unit, false), store_.take(unit));
  }
}

// Keeps the bound on what is in flight, but never waits for a peer inside a backward: one that took another branch
// joins only in the round at its end, and waits there for this rank. What can't start now starts in that round.
bool Reducer::make_way_early(std::int64_t elements) {
  while (!in_flight_.empty() && in_flight_elements_ + elements > policy_.max_in_flight) {
    if (in_flight_.front().transfer.blocks_host()) return false;
    land_oldest();
  }
  return true;
}

// A leaf unit's children run on some ranks and not on others, so only the round at the end can tell that it is
// complete.
bool Reducer::may_start_early(int unit) const {
  const bool leaf = layout_.units[static_cast<std::size_t>(unit)].leaf;
  return store_.complete(unit) && !store_.mixed(unit) && !(leaf && reduce_->size() > 1);
}

c10::ScalarType Reducer::travel_dtype(int unit, bool mixed) const {
  if (mixed) return policy_.accumulate;
  return policy_.communicate.value_or(layout_.units[static_cast<std::size_t>(unit)].compute_dtype);
}

void Reducer::start(int unit, c10::ScalarType dtype, at::Tensor contributions) {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  if (reduce_->size() == 1) {
    const tiers::DeviceSpan reduce(trace::Lane::kReduce, "reduce", u.name, device_);
    store_.land(unit, std::move(contributions));
    return;
  }
  while (!in_flight_.empty() && in_flight_elements_ + u.padded > policy_.max_in_flight) land_oldest();

  InFlight flight;
  flight.unit = unit;
  flight.elements = u.padded;
  flight.launched = tiers::DeviceMark::now(device_);
  flight.sent = contributions.defined() ? contributions.to(dtype)
                                        : at::zeros({u.padded}, at::TensorOptions(dtype).device(device_));
  flight.bytes = ledger_->track(MemoryKind::kStaging, Tier::kDevice,
                                2 * u.padded * static_cast<std::int64_t>(flight.sent.element_size()));
  flight.received = at::empty_like(flight.sent);
  flight.transfer = reduce_->all_to_all(flight.received, flight.sent, "unit " + u.name);
  in_flight_elements_ += u.padded;
  in_flight_.push_back(std::move(flight));
}

void Reducer::land_oldest() {
  InFlight flight = std::move(in_flight_.front());
  in_flight_.pop_front();
  in_flight_elements_ -= flight.elements;
  flight.transfer.wait();
  // Both may have been made by a hook, on autograd's stream.
  tiers::keep_for_current_stream(flight.sent);
  tiers::keep_for_current_stream(flight.received);
  const Unit& unit = layout_.units[static_cast<std::size_t>(flight.unit)];
  const at::Tensor sum = sum_in_rank_order(flight.received, reduce_->size());
  store_.land(flight.unit, whole(sum, unit));
  flight.launched.end(trace::Lane::kReduce, "reduce", unit.name);
}

// Stage 0 keeps the whole sum on every rank: the shards' sums are gathered, so that its bits are those of the other
// stages.
at::Tensor Reducer::whole(const at::Tensor& shard, const Unit& unit) {
  if (!policy_.keep_whole_sum || reduce_->size() == 1) return shard;
  at::Tensor all = at::empty({unit.padded}, shard.options());
  reduce_->all_gather(all, shard, "unit " + unit.name + ", summed").wait();
  return all;
}

AgreementMessage Reducer::message(const Announcement& mine) const {
  AgreementMessage message;
  message.weight = mine.weight;
  message.flags = (mine.reduce ? kReduce : 0) | (mine.ends_window ? kEndsWindow : 0) |
                  (mine.backward_since_step ? kBackwardSinceStep : 0) | (std::uint64_t{mine.scaling} << 8) |
                  (static_cast<std::uint64_t>(started_) << 32);
  message.bits.assign(static_cast<std::size_t>(bits(layout_) / 64), 0);
  message.bits.back() = mine.settings;
  const std::size_t units = layout_.units.size();
  for (std::size_t u = 0; u < units; ++u) {
    if (store_.holds(static_cast<int>(u))) set_bit(message.bits, u);
    if (store_.mixed(static_cast<int>(u))) set_bit(message.bits, units + u);
  }
  for (std::size_t p = 0; p < layout_.parameters.size(); ++p)
    if (store_.active(static_cast<int>(p))) set_bit(message.bits, 2 * units + p);
  return message;
}

Agreed Reducer::round(Call call, const Announcement& mine, int unit) {
  AgreementMessage spoken = message(mine);
  spoken.unit = static_cast<std::uint32_t>(unit);
  using Likeness = Rounds::Likeness;
  const Likeness likeness = !policy_.equal_calls      ? Likeness::kPassing
                            : call == Call::kZeroGrad ? Likeness::kSameCall  // backwards may have broken
                                                      : Likeness::kSameCounts;
  const std::vector<AgreementMessage> all = rounds_.meet(call, std::move(spoken), likeness);

  Agreed agreed;
  agreed.all_arrived = true;
  bool reduce = false;
  for (const AgreementMessage& other : all) {
    reduce |= (other.flags & kReduce) != 0;
    agreed.all_arrived &= other.kind == static_cast<std::uint32_t>(call);
    agreed.any_backward |= (other.flags & kBackwardSinceStep) != 0;
    agreed.most_backwards = std::max(agreed.most_backwards, other.backwards);
    agreed.weight += other.weight;
    agreed.furthest = std::max(agreed.furthest, started_of(other));
    agreed.same_settings &= other.bits.back() == all.front().bits.back();
  }
  if (call == Call::kStep && agreed.all_arrived) {
    for (const AgreementMessage& other : all) {
      if ((other.flags & kEndsWindow) != (all.front().flags & kEndsWindow) ||
          other.micro_batches != all.front().micro_batches)
        throw CommError("grads.step", "ranks disagree on where the window ends (rank 0 has ", all.front().micro_batches,
                        " micro-batches and says ", (all.front().flags & kEndsWindow) ? "end" : "go on",
                        ", another has ", other.micro_batches, " and says ",
                        (other.flags & kEndsWindow) ? "end" : "go on",
                        "; call step() and set_gradient_accumulation_boundary() alike on all ranks)");
      const std::uint32_t scaling = scaling_of(other);
      if (scaling != 0 && agreed.scaling != 0 && scaling != agreed.scaling)
        throw UseError("grads.step",
                       "ranks normalise one window in different ways (some give weights or scale_wrt_gas = false, "
                       "others don't; use one kind of backward on all ranks)");
      agreed.scaling = std::max(agreed.scaling, scaling);
    }
  }
  const std::size_t units = layout_.units.size();
  agreed.active.assign(layout_.parameters.size(), false);
  for (std::size_t p = 0; p < agreed.active.size(); ++p)
    agreed.active[p] = std::any_of(all.begin(), all.end(), [&](const AgreementMessage& m) {
      return m.bit(static_cast<std::int64_t>(2 * units + p));
    });

  if (reduce) reduce_agreed(all);
  return agreed;
}

void Reducer::reduce_agreed(const std::vector<AgreementMessage>& all) {
  const auto units = static_cast<std::int64_t>(layout_.units.size());
  std::size_t furthest = 0;
  for (const AgreementMessage& message : all) furthest = std::max(furthest, started_of(message));

  // First those that some rank started early: the others join with what they have of that one backward, or with zeros.
  // A mixed contribution doesn't fit the dtype that is already under way, and waits for the second pass.
  while (started_ < furthest) {
    const int unit = order_[started_++];
    const bool fits = store_.holds(unit) && !store_.mixed(unit);
    start(unit, travel_dtype(unit, false), fits ? store_.take(unit) : at::Tensor());
  }
  // Then what anybody still holds. What a rank held when it spoke may just have left in the first pass, which every
  // rank can tell from the messages.
  for (std::size_t position = 0; position < order_.size(); ++position) {
    const int unit = order_[position];
    bool held = false, mixed = false;
    for (const AgreementMessage& message : all) {
      const bool here_mixed = message.bit(units + unit);
      const bool left = position < furthest && position >= started_of(message) && !here_mixed;
      if (message.bit(unit) && !left) held = true, mixed |= here_mixed;
    }
    if (held) start(unit, travel_dtype(unit, mixed), store_.take(unit));
  }
  while (!in_flight_.empty()) land_oldest();
  started_ = 0;
}

void Reducer::come_level(const Announcement& mine) {
  if (!policy_.reduce_every_backward || rounds_.alone()) return;
  Agreed agreed;
  do {
    agreed = round(Call::kZeroGrad, mine);
  } while (!agreed.all_arrived);
  while (started_ < agreed.furthest) {
    const int unit = order_[started_++];
    start(unit, travel_dtype(unit, false), {});
  }
  while (!in_flight_.empty()) land_oldest();
}

at::Tensor Reducer::peek(int unit) {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  at::Tensor sum;
  std::exception_ptr unreadable;  // told when the others, who count on this rank, have what they came for
  try {
    if (store_.has_landed(unit)) sum = store_.landed(unit).to(device_, at::kFloat, false, true);
  } catch (const IoError&) {
    unreadable = std::current_exception();
  }
  // Held contributions travel in fp32 here: what is read needs no bit-equality with what will travel later.
  double held = 0;
  for (const auto& values : rounds_.exchange({store_.holds(unit) ? 1.0 : 0.0})) held += values.front();
  if (held == 0) {
    if (unreadable) std::rethrow_exception(unreadable);
    return sum;
  }
  at::Tensor mine = store_.holds(unit) ? store_.local(unit).to(at::kFloat)
                                       : at::zeros({u.padded}, at::TensorOptions(at::kFloat).device(device_));
  at::Tensor received = mine;
  if (reduce_->size() > 1) {
    received = at::empty_like(mine);
    reduce_->all_to_all(received, mine, "unit " + u.name + ", read").wait();
  }
  const at::Tensor pending = whole(sum_in_rank_order(received, reduce_->size()), u);
  if (unreadable) std::rethrow_exception(unreadable);
  return sum.defined() ? sum.add_(pending) : pending;
}

void Reducer::abandon() noexcept {
  in_flight_.clear();
  in_flight_elements_ = 0;
  started_ = 0;
}

}  // namespace ballast
