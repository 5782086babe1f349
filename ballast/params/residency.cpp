#include "ballast/params/residency.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "ballast/base/error.h"

namespace ballast {
namespace {

std::string text_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

Residency::Residency(const Layout& layout, ShardHome& shards, Rounds& rounds, std::shared_ptr<Communicator> gather,
                     c10::Device device, std::shared_ptr<Ledger> ledger, ResidencyLimits limits)
    : layout_(layout),
      shards_(shards),
      rounds_(rounds),
      gather_(std::move(gather)),
      ledger_(std::move(ledger)),
      limits_(limits),
      copies_(device),
      states_(layout.units.size()) {}

void Residency::adopt(int unit, at::Tensor full, std::vector<std::vector<at::Tensor>> parameters, bool persistent) {
  Lock lock(mutex_);
  State& state = at(unit);
  const std::string& name = layout_.units[static_cast<std::size_t>(unit)].name;
  state.storage = FaultStorage(
      this, unit, std::move(full),
      Error("params.read", "unit ", name, " is sharded and was read without an operator (rank ", gather_->rank(),
            "; hold gathered(params), in Python ballast.zero.GatheredParameters(params), around code "
            "that uses data_ptr())")
          .what());
  state.watch = WriteWatch(std::move(parameters));
  state.managed = true;
  state.persistent = persistent;
  if (persistent) {
    start_gather(lock, unit);
    finish_gather(lock, unit);
  }
}

void Residency::touch_and_pin(int unit) noexcept {
  Lock lock(mutex_);
  ++running_operators_;
  ++at(unit).pins;  // before the prefetch that follows a fault: it must not make room with this unit
  try {
    refuse_second_thread(lock);
    use(lock, unit);
  } catch (...) {
    fail(lock, std::current_exception());
  }
  // The operator must throw, not read nothing.
  if (failure_ && at(unit).residence != Residence::kMapped) {
    // A gather that nobody waits for any more may still write into the memory.
    if (at(unit).residence == Residence::kGathering) at(unit).storage.set_aside();
    at(unit).storage.arm(text_of(failure_));
  }
}

void Residency::written(int unit, std::int64_t element) noexcept {
  Lock lock(mutex_);
  if (const auto slot = layout_.units[static_cast<std::size_t>(unit)].slot_at(element)) at(unit).watch.mark(*slot);
}

void Residency::unpin(int unit) noexcept {
  Lock lock(mutex_);
  --at(unit).pins;
  if (--running_operators_ == 0) operator_thread_ = {};
}

void Residency::touch_in_child(int unit) noexcept {
  State& state = at(unit);
  if (state.residence == Residence::kGathering) state.storage.set_aside();  // half of it may have come
  state.storage.arm_in_child(name(unit));
}

void Residency::hold(int unit) {
  if (!at(unit).managed) return;
  Lock lock(mutex_);
  ++at(unit).pins;  // as above
  try {
    use(lock, unit);
  } catch (...) {
    fail(lock, std::current_exception());
  }
  if (failure_) {
    --at(unit).pins;
    std::rethrow_exception(failure_);
  }
}

void Residency::let_go(int unit) noexcept {
  Lock lock(mutex_);
  if (at(unit).managed) --at(unit).pins;
}

void Residency::refuse_second_thread(const Lock&) {
  const std::thread::id here = std::this_thread::get_id();
  if (gather_->size() > 1 && running_operators_ > 1 && operator_thread_ != here)
    throw UseError("params.fault", "two threads use this engine's parameters at the same time (rank ", gather_->rank(),
                   " of ", gather_->size(),
                   "; at stage 3 the order of gathers must be equal on all ranks: run forwards one after the other)");
  operator_thread_ = here;
}

void Residency::use(const Lock& held, int unit) {
  if (failure_) return;
  State& state = at(unit);
  if (state.residence == Residence::kMapped && state.touched) {
    state.storage.used_on_current_stream();
  } else {
    fault(held, unit);
  }
}

void Residency::fault(const Lock& held, int unit) {
  State& state = at(unit);
  if (state.residence == Residence::kSharded) {
    ++faults_;
    make_room(held, size(unit), false);
    start_gather(held, unit);
  } else {
    ++prefetched_;
  }
  finish_gather(held, unit);
  if (!state.touched && !state.persistent) ahead_ -= size(unit);
  state.touched = true;
  state.storage.used_on_current_stream();
  if (state.persistent) return;
  order_.record(unit);
  prefetch(held);
}

void Residency::start_gather(const Lock& held, int unit) {
  State& state = at(unit);
  rounds_.meet_on_unit(Call::kGather, unit);
  state.update.wait(name(unit));
  state.behind = false;
  Ledger::Entry bytes = ledger_->track(MemoryKind::kGathered, Tier::kDevice,
                                       size(unit) * static_cast<std::int64_t>(state.storage.flat().element_size()));
  state.storage.map();
  state.bytes = std::move(bytes);
  state.residence = Residence::kGathering;
  state.touched = false;
  if (!state.persistent) {
    mapped_order_.push_back(unit);
    live_ += size(unit);
    ahead_ += size(unit);
  }
  fetch(held, unit);
}

void Residency::fetch(const Lock&, int unit) {
  State& state = at(unit);
  const at::Tensor& flat = state.storage.flat();
  const std::string what = "unit " + name(unit);
  state.launched = tiers::DeviceMark::now(flat.device());
  if (const at::Tensor& shard = shards_.resting(unit); shard.defined() && shard.device() == flat.device()) {
    state.gather = gather_->all_gather(flat, shard, what);
    return;
  }
  const Range mine = layout_.units[static_cast<std::size_t>(unit)].shard_of(gather_->rank());
  const at::Tensor slice = flat.narrow(0, mine.begin, mine.size());
  // The memory may have been somebody's whose work is still queued on the current stream.
  const auto free = tiers::DeviceStream::mark_current(flat.device());
  shards_.lend(unit, ShardHome::Access::kRead, [&](const at::Tensor& shard) {
    copies_.wait_for(free);
    const tiers::DeviceStream::Scope on(copies_);
    const tiers::DeviceSpan copy(trace::Lane::kCopies, "to the device: shard of", name(unit), flat.device());
    slice.copy_(shard, /*non_blocking=*/true);
    state.storage.used_on_current_stream();
    return state.fetched = copies_.mark();
  });
  const tiers::DeviceStream::Scope on(copies_);
  state.gather = gather_->all_gather(flat, slice, what);
}

void Residency::finish_gather(const Lock&, int unit) {
  State& state = at(unit);
  if (state.residence != Residence::kGathering) return;
  state.gather.wait();
  state.fetched.block_current_stream();
  state.launched.end(trace::Lane::kGather, "gather", name(unit));
  state.storage.filled_on_current_stream();
  state.storage.used_on_current_stream();  // by the wait: the unit may leave before anything else does
  state.residence = Residence::kMapped;
  state.watch.accept_all();
}

// Drops the oldest until `elements` more fit. A unit that an operator uses now stays, and for a prefetch also what was
// itself gathered ahead and not used yet: a guess doesn't push out an earlier guess.
bool Residency::make_room(const Lock& held, std::int64_t elements, bool for_prefetch) {
  for (std::size_t i = 0; live_ + elements > limits_.max_live && i < mapped_order_.size();) {
    const State& oldest = at(mapped_order_[i]);
    if (oldest.pins > 0 || (for_prefetch && !oldest.touched)) {
      ++i;
    } else {
      drop(held, mapped_order_[i]);
    }
  }
  return live_ + elements <= limits_.max_live;
}

// Beyond what is gathered ahead, shards on disk are read ahead: a rank's own business, of which no other hears.
void Residency::prefetch(const Lock& held) {
  FaultOrder::State state = order_.now();
  bool gathers = true;
  int reads = shards_.read_ahead();
  for (std::size_t looked = 0; looked < layout_.units.size(); ++looked) {
    const int next = order_.predict(state);
    if (next < 0) return;
    state = {state.last, next};
    if (at(next).residence != Residence::kSharded) {
      if (at(next).touched) return;  // it faulted last time and is here now: the order has changed
      continue;
    }
    // Ahead of its update there is nothing to gather, and a wait here would hold up the operator that runs now. Whether
    // it has run already is timing, which may decide what is read from disk, but not what is gathered.
    if (!at(next).update.has_run()) return;
    gathers =
        gathers && !at(next).behind && ahead_ + size(next) <= limits_.prefetch && make_room(held, size(next), true);
    if (gathers) {
      start_gather(held, next);
    } else if (reads <= 0) {
      return;
    } else if (shards_.tier(next) == Tier::kNvme) {
      shards_.expect(next);
      --reads;
    }
  }
}

void Residency::refuse_lost_write(const Lock&, int unit) const {
  const auto slot = at(unit).watch.find();
  if (!slot) return;
  const Unit& owner = layout_.units[static_cast<std::size_t>(unit)];
  throw ballast::lost_write(layout_.parameters[static_cast<std::size_t>(owner.slots[*slot].parameter)].name(),
                            gather_->rank());
}

std::optional<std::size_t> Residency::lost_write(int unit) const {
  Lock lock(mutex_);
  if (!at(unit).managed || at(unit).residence != Residence::kMapped) return std::nullopt;
  return at(unit).watch.find();
}

void Residency::drop(const Lock& held, int unit) {
  State& state = at(unit);
  finish_gather(held, unit);
  refuse_lost_write(held, unit);
  state.storage.unmap();
  state.bytes = {};
  state.residence = Residence::kSharded;
  if (!state.persistent) {
    mapped_order_.erase(std::find(mapped_order_.begin(), mapped_order_.end(), unit));
    live_ -= size(unit);
    if (!state.touched) ahead_ -= size(unit);
  }
}

void Residency::close(int unit) {
  Lock lock(mutex_);
  State& state = at(unit);
  if (!state.managed || state.residence == Residence::kSharded) return;
  // Held by gathered(), so on all ranks: its pointers stay good, and the new values come to where they point.
  if (state.pins > 0) {
    refuse_lost_write(lock, unit);
  } else {
    drop(lock, unit);
  }
}

void Residency::open_after(int unit, PendingUpdate update) {
  Lock lock(mutex_);
  State& state = at(unit);
  if (!state.managed) return;
  state.update = std::move(update);
  state.behind = static_cast<bool>(state.update);
  if (state.pins > 0) {
    state.update.wait(name(unit));
    state.behind = false;
    rounds_.meet_on_unit(Call::kGather, unit);
    fetch(lock, unit);
    state.residence = Residence::kGathering;
    finish_gather(lock, unit);
  } else if (state.persistent) {
    start_gather(lock, unit);
    finish_gather(lock, unit);
  }
}

void Residency::shard_moved(int unit, bool regather) {
  Lock lock(mutex_);
  State& state = at(unit);
  if (!state.managed) return;
  state.update.wait(name(unit));
  if (state.residence != Residence::kSharded && state.pins == 0) drop(lock, unit);
  if (regather && state.persistent && state.residence == Residence::kSharded) {
    start_gather(lock, unit);
    finish_gather(lock, unit);
  }
}

void Residency::settle(int unit) {
  Lock lock(mutex_);
  at(unit).update.wait(name(unit));
}

void Residency::accept_write(int unit, std::size_t slot) {
  Lock lock(mutex_);
  if (at(unit).managed) at(unit).watch.accept(slot);
}

void Residency::fail(const Lock&, std::exception_ptr cause) noexcept {
  if (!failure_) failure_ = std::move(cause);
}

void Residency::refuse(std::exception_ptr cause) noexcept {
  Lock lock(mutex_);
  fail(lock, std::move(cause));
}

std::exception_ptr Residency::failure() const {
  Lock lock(mutex_);
  return failure_;
}

void Residency::restore() {
  Lock lock(mutex_);
  for (std::size_t u = 0; u < states_.size(); ++u) {
    State& state = states_[u];
    if (!state.managed) continue;
    if (state.residence == Residence::kSharded) start_gather(lock, static_cast<int>(u));
    finish_gather(lock, static_cast<int>(u));
    state.storage.surrender({});  // mapped
    state.bytes = {};
    state.managed = false;
  }
}

void Residency::abandon() noexcept {
  Lock lock(mutex_);
  for (std::size_t u = 0; u < states_.size(); ++u) {
    State& state = states_[u];
    if (!state.managed) continue;
    state.gather = {};
    try {
      state.fetched.block_current_stream();
    } catch (const std::exception&) {  // of a device that is broken, which every later use of it says
    }
    state.storage.surrender(Error("params.read", "the engine ended while unit ", layout_.units[u].name,
                                  " was sharded, so this rank has no values of it (rank ", gather_->rank(),
                                  failure_ ? "; another error came first)"
                                           : "; keep the engine while its module is used, or end it on all ranks)")
                                .what());
    state.bytes = {};
    state.managed = false;
  }
}

}  // namespace ballast
