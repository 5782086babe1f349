#include "ballast/params/param_store.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "ballast/base/error.h"

namespace ballast {

ParamStore::ParamStore(const Layout& layout, const ParamPolicy& policy, std::vector<at::Tensor> parameters,
                       c10::Device device, std::shared_ptr<Communicator> gather, Rounds& rounds,
                       std::shared_ptr<Ledger> ledger, const OriginalSink& original)
    : layout_(layout),
      policy_(policy),
      parameters_(std::move(parameters)),
      gather_(std::move(gather)),
      ledger_(std::move(ledger)),
      units_(layout.units.size()) {
  const at::NoGradGuard no_grad;
  if (policy_.sharded) residency_ = std::make_unique<Residency>(layout_, rounds, gather_, ledger_, policy_.limits);
  std::int64_t persistent_left = policy_.persistent_total;
  for (const Unit& unit : layout_.units) take_over(unit, device, original, persistent_left);
}

void ParamStore::take_over(const Unit& unit, c10::Device device, const OriginalSink& original,
                           std::int64_t& persistent_left) {
  at::Tensor values = at::zeros({unit.padded}, at::TensorOptions(unit.dtype).device(device));
  std::vector<at::Tensor> members;
  for (const Slot& slot : unit.slots) {
    const at::Tensor& parameter = parameters_[static_cast<std::size_t>(slot.parameter)];
    values.narrow(0, slot.offset, slot.numel).copy_(parameter.detach().reshape({-1}));
    members.push_back(parameter);
  }
  gather_->broadcast(values, 0, "unit " + unit.name + ", initial values").wait();
  if (unit.trainable) original(unit, values);

  UnitParams& mine = units_[static_cast<std::size_t>(unit.id)];
  mine.full = unit.compute_dtype == unit.dtype ? std::move(values) : values.to(unit.compute_dtype);
  for (const Slot& slot : unit.slots) {
    at::Tensor& parameter = parameters_[static_cast<std::size_t>(slot.parameter)];
    parameter.set_data(mine.full.narrow(0, slot.offset, slot.numel).view(parameter.sizes()));
  }
  const auto element = static_cast<std::int64_t>(mine.full.element_size());
  if (!policy_.sharded) {
    const Range range = owned_range(unit.id);
    mine.owned = mine.full.narrow(0, range.begin, range.size());
    mine.bytes = ledger_->track(MemoryKind::kParams, Tier::kDevice, unit.padded * element);
    return;
  }
  mine.owned = mine.full.narrow(0, unit.shard_of(gather_->rank()).begin, unit.shard).clone();
  mine.bytes = ledger_->track(MemoryKind::kParams, Tier::kDevice, unit.shard * element);
  const bool persistent = unit.numel <= policy_.persistent_unit && unit.numel <= persistent_left;
  if (persistent) persistent_left -= unit.numel;
  residency_->adopt(unit.id, mine.full, mine.owned, std::move(members), persistent);
}

Range ParamStore::owned_range(int unit) const {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  return policy_.updates_whole ? Range{0, u.padded} : u.shard_of(gather_->rank());
}

void ParamStore::publish(int unit, const std::vector<bool>& updated) {
  const Unit& u = layout_.units[static_cast<std::size_t>(unit)];
  // A graph from before the update must refuse to run its backward, as after torch.optim's in-place step.
  for (const Slot& slot : u.slots) {
    const auto p = static_cast<std::size_t>(slot.parameter);
    if (updated[p]) parameters_[p].unsafeGetTensorImpl()->bump_version();
  }
  if (policy_.sharded) {
    residency_->accept_writes(unit);
    residency_->invalidate(unit);
  } else if (!policy_.updates_whole && gather_->size() > 1) {
    while (!publishing_.empty() && publishing_elements_ + u.padded > policy_.publish_in_flight) {
      publishing_.front().gather.wait();
      publishing_elements_ -= publishing_.front().elements;
      publishing_.pop_front();
    }
    publishing_.push_back({u.padded, gather_->all_gather(full(unit), owned(unit), "unit " + u.name + ", updated")});
    publishing_elements_ += u.padded;
  }
}

void ParamStore::finish_publish() {
  for (Publishing& publishing : publishing_) publishing.gather.wait();
  publishing_.clear();
  publishing_elements_ = 0;
}

void ParamStore::hold(int unit) {
  if (residency_) residency_->hold(unit);
}

void ParamStore::let_go(int unit) noexcept {
  if (residency_) residency_->let_go(unit);
}

void ParamStore::adopt_full(int unit) {
  if (!policy_.sharded) return;  // owned is a view of full
  const at::NoGradGuard no_grad;
  const Range range = owned_range(unit);
  owned(unit).copy_(full(unit).narrow(0, range.begin, range.size()));
  residency_->accept_writes(unit);
}

void ParamStore::refuse_lost_writes() const {
  if (residency_) residency_->refuse_lost_writes();
}

void ParamStore::refuse_changed_module() const {
  for (const Unit& unit : layout_.units) {
    const c10::StorageImpl* ours = full(unit.id).storage().unsafeGetStorageImpl();
    for (const Slot& slot : unit.slots) {
      const at::Tensor& parameter = this->parameter(slot.parameter);
      const std::string& name = layout_.parameters[static_cast<std::size_t>(slot.parameter)].name();
      if (!parameter.has_storage() || parameter.storage().unsafeGetStorageImpl() != ours)
        throw UseError(
            "params.step", "a parameter's data was exchanged after the engine was made (", name,
            "; convert the module with to() or set_data() before, or call shutdown() and make a new engine)");
      if (!unit.trainable && parameter.requires_grad())
        throw UseError("params.step", "a parameter that was frozen when the engine was made requires grad now (", name,
                       "; call shutdown() and make a new engine)");
    }
  }
}

void ParamStore::rethrow_failure() const {
  if (!residency_) return;
  if (auto cause = residency_->failure()) std::rethrow_exception(cause);
}

void ParamStore::restore() {
  finish_publish();
  if (residency_) residency_->restore();
  residency_.reset();
}

ParamStore::~ParamStore() {
  publishing_.clear();
  if (residency_) residency_->abandon();
}

}  // namespace ballast
