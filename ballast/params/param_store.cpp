#include "ballast/params/param_store.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "ballast/base/error.h"

namespace ballast {
namespace {

// The tensor shows this data from now on. set_data() refuses to take a tensor off the meta device; as nothing can have
// been computed with such a one, there is no graph that would have to know.
void point_at(at::Tensor& tensor, const at::Tensor& data) {
  if (!tensor.is_meta()) return tensor.set_data(data);
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

}  // namespace

ParamStore::ParamStore(const Layout& layout, const ParamPolicy& policy, std::vector<std::vector<at::Tensor>> parameters,
                       c10::Device device, std::shared_ptr<Communicator> gather, Rounds& rounds,
                       std::shared_ptr<Ledger> ledger, tiers::HostLane* lane, const OriginalSink& original,
                       const Materialize& materialize)
    : layout_(layout),
      policy_(policy),
      parameters_(std::move(parameters)),
      gather_(std::move(gather)),
      ledger_(std::move(ledger)),
      lane_(lane),
      units_(layout.units.size()) {
  const at::NoGradGuard no_grad;
  if (policy_.sharded) {
    shards_ = std::make_unique<ShardHome>(layout_, policy_.shards, gather_->rank(), device, ledger_);
    residency_ = std::make_unique<Residency>(layout_, *shards_, rounds, gather_, device, ledger_, policy_.limits);
  }
  if (!policy_.sharded && lane_ != nullptr) gate_ = std::make_unique<UpdateGate>(layout_);
  std::int64_t persistent_left = policy_.persistent_total;
  for (const Unit& unit : layout_.units) take_over(unit, device, original, materialize, persistent_left);
}

// By slot; undefined where the tensor is on the meta device and another rank has its values.
std::vector<at::Tensor> ParamStore::initial_values(const Unit& unit, const Materialize& materialize) const {
  std::vector<at::Tensor> values;
  std::vector<int> missing;        // parameters
  std::vector<std::size_t> slots;  // theirs
  for (const Slot& slot : unit.slots) {
    const at::Tensor& tensor = parameter(slot.parameter);
    values.push_back(tensor.is_meta() ? at::Tensor() : tensor.detach());
    if (!tensor.is_meta()) continue;
    missing.push_back(slot.parameter);
    slots.push_back(values.size() - 1);
  }
  if (missing.empty()) return values;
  if (!materialize)
    throw UseError("params.take_over", "a parameter on the meta device has no values (",
                   layout_.parameters[static_cast<std::size_t>(missing.front())].name(),
                   "; build the module on a real device, or say how its values are made: EngineOptions::materialize)");
  const std::vector<at::Tensor> made = materialize(missing);
  for (std::size_t i = 0; i < made.size(); ++i) values[slots[i]] = made[i].detach();
  return values;
}

void ParamStore::take_over(const Unit& unit, c10::Device device, const OriginalSink& original,
                           const Materialize& materialize, std::int64_t& persistent_left) {
  at::Tensor values = at::zeros({unit.padded}, at::TensorOptions(unit.dtype).device(device));
  {
    const std::vector<at::Tensor> initial = initial_values(unit, materialize);
    for (std::size_t i = 0; i < initial.size(); ++i)
      if (initial[i].defined())
        values.narrow(0, unit.slots[i].offset, unit.slots[i].numel).copy_(initial[i].reshape({-1}));
  }
  gather_->broadcast(values, 0, "unit " + unit.name + ", initial values").wait();
  if (unit.trainable) original(unit, values);

  UnitParams& mine = units_[static_cast<std::size_t>(unit.id)];
  mine.full = unit.compute_dtype == unit.dtype ? std::move(values) : values.to(unit.compute_dtype);
  for (const Slot& slot : unit.slots)
    for (at::Tensor& tensor : parameters_[static_cast<std::size_t>(slot.parameter)])
      point_at(tensor, mine.full.narrow(0, slot.offset, slot.numel).view(tensor.sizes()));
  const auto element = static_cast<std::int64_t>(mine.full.element_size());
  if (!policy_.sharded) {
    alias_whole(unit.id);
    mine.bytes = ledger_->track(MemoryKind::kParams, Tier::kDevice, unit.padded * element);
    if (gate_ && unit.trainable) gate_->adopt(unit.id, mine.full, &mine.watch, gather_->rank());
    return;
  }
  shards_->set_initial(unit.id, mine.full.narrow(0, unit.shard_of(gather_->rank()).begin, unit.shard));
  const bool persistent = unit.numel <= policy_.persistent_unit && unit.numel <= persistent_left;
  if (persistent) persistent_left -= unit.numel;
  residency_->adopt(unit.id, mine.full, members(unit), persistent);
}

// A second tensor over the same memory: the module's storage is unmapped while an update writes here.
void ParamStore::alias_whole(int unit) {
  UnitParams& mine = units_[static_cast<std::size_t>(unit)];
  const bool hides = gate_ && mine.full.numel() > 0;
  mine.whole = hides ? at::from_blob(mine.full.mutable_data_ptr(), mine.full.sizes(), mine.full.options()) : mine.full;
  const Range range = owned_range(unit);
  mine.owned = mine.whole.narrow(0, range.begin, range.size());
}

void ParamStore::take_away(const std::function<void(int unit)>& rebind) {
  finish_publish();
  if (policy_.sharded) {
    move_shards(c10::kCPU, Tier::kHost, rebind);
    return;
  }
  if (!gate_) gate_ = std::make_unique<UpdateGate>(layout_);
  gate_->on_moved([this, rebind](int unit) {
    alias_whole(unit);
    UnitParams& mine = units_[static_cast<std::size_t>(unit)];
    mine.bytes = ledger_->track(MemoryKind::kParams, Tier::kDevice, mine.bytes.bytes());
    rebind(unit);
  });
  for (const Unit& unit : layout_.units) {
    UnitParams& mine = units_[static_cast<std::size_t>(unit.id)];
    if (!gate_->manages(unit.id))
      gate_->adopt(unit.id, mine.full, unit.trainable ? &mine.watch : nullptr, gather_->rank());
    if (mine.holds > 0 || !gate_->take_away(unit.id)) continue;
    mine.whole.reset();
    mine.owned.reset();
    mine.bytes = ledger_->track(MemoryKind::kParams, Tier::kHost, mine.bytes.bytes());
  }
}

void ParamStore::bring_back(const std::function<void(int unit)>& rebind) {
  if (policy_.sharded) move_shards(full(0).device(), Tier::kDevice, rebind);
  finish_publish();
}

void ParamStore::move_shards(c10::Device to, Tier tier, const std::function<void(int unit)>& rebind) {
  const at::NoGradGuard no_grad;
  if (policy_.shards.tier == Tier::kDevice) shards_->move(to, tier);  // others rest off it; what is gathered goes
  for (const Unit& unit : layout_.units) {
    residency_->shard_moved(unit.id, /*regather=*/tier == Tier::kDevice);
    rebind(unit.id);
  }
}

std::vector<std::vector<at::Tensor>> ParamStore::members(const Unit& unit) const {
  std::vector<std::vector<at::Tensor>> result;
  for (const Slot& slot : unit.slots) result.push_back(tensors(slot.parameter));
  return result;
}

Range ParamStore::owned_range(int unit) const {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  return policy_.updates_whole ? Range{0, u.padded} : u.shard_of(gather_->rank());
}

const at::Tensor& ParamStore::owned(int unit) const {
  return shards_ ? shards_->resting(unit) : units_[static_cast<std::size_t>(unit)].owned;
}

void ParamStore::with_owned(int unit, ShardHome::Access access, const std::function<void(const at::Tensor&)>& body) {
  if (!shards_) return body(owned(unit));
  shards_->lend(unit, access, [&](const at::Tensor& shard) -> tiers::DeviceEvent {
    body(shard);
    return {};
  });
}

void ParamStore::publish(int unit, const std::vector<bool>& updated, std::function<void()> update) {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  // A graph from before the update must refuse to run its backward, as after torch.optim's in-place step.
  for (std::size_t slot = 0; slot < u.slots.size(); ++slot)
    if (updated[static_cast<std::size_t>(u.slots[slot].parameter)]) new_version(u, slot);
  if (residency_) residency_->close(unit);
  const bool travels = !policy_.sharded && !policy_.updates_whole && gather_->size() > 1;
  if (lane_ != nullptr && u.trainable) return publish_on_lane(unit, travels, std::move(update));

  if (residency_) residency_->open_after(unit, {});
  if (!travels) return;
  while (!publishing_.empty() && publishing_elements_ + u.padded > policy_.publish_in_flight) {
    finish(publishing_.front());
    publishing_elements_ -= publishing_.front().unit->padded;
    publishing_.pop_front();
  }
  publishing_.push_back(start_publishing(unit));
  publishing_elements_ += u.padded;
}

ParamStore::Publishing ParamStore::start_publishing(int unit) {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  const auto launched = tiers::DeviceMark::now(owned(unit).device());
  return {
      &u,
      gather_->all_gather(units_[static_cast<std::size_t>(unit)].whole, owned(unit), "unit " + u.name + ", updated"),
      launched};
}

void ParamStore::finish(Publishing& publishing) {
  publishing.gather.wait();
  publishing.launched.end(trace::Lane::kGather, "gather", publishing.unit->name);
}

void ParamStore::publish_on_lane(int unit, bool travels, std::function<void()> update) {
  // What the device still has to do with the old values comes before the new ones overwrite them.
  const auto old_values_read = tiers::DeviceStream::mark_current(full(unit).device());
  const auto published = std::make_shared<tiers::DeviceEvent>();
  auto job = [this, unit, travels, old_values_read, published, update = std::move(update)] {
    // A copy to the device reads a shard on the host, where nothing but waiting holds this thread's writes back.
    if (shards_ && shards_->tier(unit) == Tier::kHost) old_values_read.synchronize();
    lane_->stream().wait_for(old_values_read);
    if (update) update();
    if (travels) {
      Publishing publishing = start_publishing(unit);
      finish(publishing);
    }
    *published = lane_->stream().mark();
  };
  const auto ticket = lane_->submit(std::move(job), "update");
  if (travels) last_on_lane_ = ticket;
  PendingUpdate pending(*lane_, ticket, published);
  if (gate_) {
    gate_->close_until(unit, std::move(pending));
    if (units_[static_cast<std::size_t>(unit)].holds > 0) gate_->settle(unit);  // its pointers stay good
  } else {
    residency_->open_after(unit, std::move(pending));
  }
}

void ParamStore::finish_publish() {
  for (Publishing& publishing : publishing_) finish(publishing);
  publishing_.clear();
  publishing_elements_ = 0;
  for (const Unit& unit : layout_.units) settle(unit.id);
  if (shards_) shards_->finish();
}

void ParamStore::finish_launching() {
  if (lane_ != nullptr && !lane_->stream().device().is_cpu()) lane_->wait(last_on_lane_, "launch of gathers");
}

void ParamStore::settle(int unit) {
  if (gate_) gate_->settle(unit);
  if (residency_) residency_->settle(unit);
}

void ParamStore::before_write(int unit) {
  settle(unit);
  if (shards_ && shards_->tier(unit) == Tier::kHost)
    tiers::DeviceStream::mark_current(full(unit).device()).synchronize();
}

void ParamStore::hold(int unit) {
  ++units_[static_cast<std::size_t>(unit)].holds;
  if (gate_) gate_->settle(unit);
  if (residency_) residency_->hold(unit);
}

void ParamStore::let_go(int unit) noexcept {
  --units_[static_cast<std::size_t>(unit)].holds;
  if (residency_) residency_->let_go(unit);
}

void ParamStore::new_version(const Unit& unit, std::size_t slot) {
  for (const at::Tensor& tensor : tensors(unit.slots[slot].parameter)) tensor.unsafeGetTensorImpl()->bump_version();
  if (residency_) {
    residency_->accept_write(unit.id, slot);
  } else if (UnitParams& mine = units_[static_cast<std::size_t>(unit.id)]; mine.watched) {
    mine.watch.accept(slot);
  }
}

void ParamStore::adopt(int parameter) {
  const auto slot = static_cast<std::size_t>(layout_.places[static_cast<std::size_t>(parameter)].slot);
  const Unit& unit = layout_.unit_of(parameter);
  if (policy_.sharded) {  // else owned is a view of full
    const at::NoGradGuard no_grad;
    const Range range = owned_range(unit.id);
    const Range part = intersect(range, {unit.slots[slot].offset, unit.slots[slot].offset + unit.slots[slot].numel});
    if (!part.empty())
      with_owned(unit.id, ShardHome::Access::kChange, [&](const at::Tensor& shard) {
        shard.narrow(0, part.begin - range.begin, part.size()).copy_(full(unit.id).narrow(0, part.begin, part.size()));
      });
  }
  new_version(unit, slot);
}

void ParamStore::watch_writes(int unit) {
  if (policy_.sharded) return;
  UnitParams& mine = units_[static_cast<std::size_t>(unit)];
  mine.watch = WriteWatch(members(layout_.units[static_cast<std::size_t>(unit)]));
  mine.watched = true;
}

std::optional<int> ParamStore::find_lost_write(int unit) const {
  const auto slot = residency_ ? residency_->lost_write(unit) : units_[static_cast<std::size_t>(unit)].watch.find();
  if (!slot) return std::nullopt;
  return layout_.units[static_cast<std::size_t>(unit)].slots[*slot].parameter;
}

void ParamStore::refuse_lost_writes() const {
  for (const Unit& unit : layout_.units)
    if (const auto parameter = find_lost_write(unit.id))
      throw lost_write(layout_.parameters[static_cast<std::size_t>(*parameter)].name(), gather_->rank());
}

void ParamStore::refuse_changed_module() const {
  for (const Unit& unit : layout_.units) {
    const c10::StorageImpl* ours = full(unit.id).storage().unsafeGetStorageImpl();
    for (const Slot& slot : unit.slots) {
      const std::string& name = layout_.parameters[static_cast<std::size_t>(slot.parameter)].name();
      for (const at::Tensor& tensor : tensors(slot.parameter))
        if (!tensor.has_storage() || tensor.storage().unsafeGetStorageImpl() != ours)
          throw UseError(
              "params.step", "a parameter's data was exchanged after the engine was made (", name,
              "; convert the module with to() or set_data() before, or call shutdown() and make a new engine)");
      if (!unit.trainable && std::any_of(tensors(slot.parameter).begin(), tensors(slot.parameter).end(),
                                         [](const at::Tensor& tensor) { return tensor.requires_grad(); }))
        throw UseError("params.step", "a parameter that was frozen when the engine was made requires grad now (", name,
                       "; call shutdown() and make a new engine)");
    }
  }
}

std::exception_ptr ParamStore::failure() const {
  if (shards_)
    if (std::exception_ptr of_disk = shards_->failure()) return of_disk;
  return residency_ ? residency_->failure() : gate_ ? gate_->failure() : nullptr;
}

void ParamStore::rethrow_failure() const {
  if (auto cause = failure()) std::rethrow_exception(cause);
}

void ParamStore::restore() {
  finish_publish();
  if (policy_.shards.tier != Tier::kDevice && !units_.empty() && !full(0).device().is_cpu()) {
    give_back_on_host();
    residency_.reset();
  }
  if (residency_) residency_->restore();
  if (gate_) gate_->restore();
  residency_.reset();
  gate_.reset();
}

void ParamStore::give_back_on_host() {
  const at::NoGradGuard no_grad;
  const at::DisableRecordFunctionGuard unobserved;
  for (const Unit& unit : layout_.units) {
    hold(unit.id);
    const at::Tensor values = full(unit.id).cpu();
    for (const Slot& slot : unit.slots)
      for (at::Tensor& tensor : parameters_[static_cast<std::size_t>(slot.parameter)])
        tensor.set_data(values.narrow(0, slot.offset, slot.numel).view(tensor.sizes()));
    let_go(unit.id);
  }
}

ParamStore::~ParamStore() {
  publishing_.clear();
  if (residency_) residency_->abandon();
}

}  // namespace ballast
