// Full values by name: gradients, parameters, optimizer states, read and written between calls.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <cmath>

#include "ballast/base/error.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/rank_likeness.h"

namespace ballast {
namespace {

constexpr double kMostSteps = 0x1p53;  // whole numbers beyond aren't all doubles

at::Tensor slice(const at::Tensor& flat, const ParameterInfo& info, const Slot& slot) {
  return flat.narrow(0, slot.offset, slot.numel).view(info.shape);
}

void check_shape(const char* operation, const ParameterInfo& info, const at::Tensor& value) {
  if (!value.defined() || value.sizes() != at::IntArrayRef(info.shape))
    throw UseError(operation, "the value has another shape than the parameter (", info.name(), ": got ",
                   value.defined() ? c10::str(value.sizes()) : "undefined", ", want ", at::IntArrayRef(info.shape),
                   ")");
}

void check_trainable(const char* operation, const ParameterInfo& info) {
  if (!info.trainable)
    throw UseError(operation, "a frozen parameter has neither gradient nor optimizer state (", info.name(), ")");
}

// As torch.optim keeps it: a whole number in a tensor, which a checkpoint may have given one dimension.
std::int64_t step_count(const ParameterInfo& info, const at::Tensor& value) {
  if (!value.defined() || value.numel() != 1 || value.dim() > 1)
    throw UseError("engine.set_full_optimizer_state", "a step count is one number (", info.name(), ": got shape ",
                   value.defined() ? c10::str(value.sizes()) : "undefined", ")");
  const double count = value.item<double>();
  if (!(count >= 0 && count <= kMostSteps && count == std::floor(count)))
    throw UseError("engine.set_full_optimizer_state", "a step count is a whole number >= 0 (", info.name(), ": got ",
                   count, ")");
  return static_cast<std::int64_t>(count);
}

}  // namespace

void Engine::Impl::meet_on_parameter(const char* operation, int parameter, const std::string& key) {
  meet(Call::kAccess, layout.unit_of(parameter).id);
  check_same_request(*rounds, operation, "call it for the same parameter on all ranks",
                     operation + (" " + std::to_string(parameter)) + " " + key);
}

at::Tensor Engine::Impl::whole_on_device(int unit, const at::Tensor& kept) {
  const at::Tensor mine = kept.to(world.device(), at::kFloat).contiguous();
  if (policies.optimizer.whole || world.size() == 1) return mine;
  at::Tensor all = at::empty({layout.units[static_cast<std::size_t>(unit)].padded}, mine.options());
  gather->all_gather(all, mine, "unit " + layout.units[static_cast<std::size_t>(unit)].name + ", read").wait();
  return all;
}

Engine::Impl::Normaliser Engine::Impl::prospective_normaliser() {
  double weight = 0;
  auto scaling = Window::Scaling::kUnset;
  for (const auto& values : rounds->exchange({window.weight(), static_cast<double>(window.scaling())})) {
    weight += values[0];
    scaling = std::max(scaling, static_cast<Window::Scaling>(static_cast<int>(values[1])));
  }
  const double steps = static_cast<double>(window.accumulation_steps());
  switch (scaling) {
    case Window::Scaling::kWeighted:
      return {scaling, weight > 0 ? weight : 1};  // so far all contributions are zero
    case Window::Scaling::kSum:
      return {scaling, static_cast<double>(world.size())};
    default:
      return {scaling, world.size() * steps};
  }
}

at::Tensor Engine::full_grad(const std::string& name) {
  Impl& engine = running();
  engine.check_usable();
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  check_trainable("engine.full_grad", info);
  const int unit = engine.layout.unit_of(parameter).id;
  return engine.final_on_error([&]() -> at::Tensor {
    engine.meet_on_parameter("engine.full_grad", parameter);
    double active = 0;
    for (const auto& values : engine.rounds->exchange({engine.grads->active(parameter) ? 1.0 : 0.0}))
      active += values.front();
    const double normaliser = engine.prospective_normaliser().divisor;
    at::Tensor sum = engine.reducer->peek(unit);
    if (active == 0 || !sum.defined()) return {};
    if (!engine.policies.grads.keep_whole_sum) sum = engine.whole_on_device(unit, sum);
    return slice(sum, info, engine.layout.slot_of(parameter)).mul(1 / (normaliser * engine.scaler.scale()));
  });
}

void Engine::set_full_grad(const std::string& name, const at::Tensor& value) {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.set_full_grad");
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  check_trainable("engine.set_full_grad", info);
  check_shape("engine.set_full_grad", info, value);
  engine.final_on_error([&] {
    engine.meet_on_parameter("engine.set_full_grad", parameter);
    const Impl::Normaliser normaliser = engine.prospective_normaliser();
    if (normaliser.scaling == Window::Scaling::kUnset) engine.window.take_given();
    engine.grads->overwrite(parameter,
                            value.to(engine.world.device(), at::kFloat) * (normaliser.divisor * engine.scaler.scale()));
  });
}

at::Tensor Engine::full_parameter(const std::string& name) {
  Impl& engine = running();
  engine.check_usable();
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  const int unit = engine.layout.unit_of(parameter).id;
  const Slot& slot = engine.layout.slot_of(parameter);
  return engine.final_on_error([&] {
    engine.meet_on_parameter("engine.full_parameter", parameter);
    if (info.trainable)
      return slice(engine.whole_on_device(unit, engine.optimizer->read(unit, "")), info, slot).clone();
    engine.params->hold(unit);
    at::Tensor value = slice(engine.params->full(unit), info, slot).to(at::kFloat, false, /*copy=*/true);
    engine.params->let_go(unit);
    return value;
  });
}

at::Tensor Engine::full_optimizer_state(const std::string& name, const std::string& key) {
  Impl& engine = running();
  engine.check_usable();
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  check_trainable("engine.full_optimizer_state", info);
  const int unit = engine.layout.unit_of(parameter).id;
  if (key == OptimizerStates::kStepKey)
    return engine.final_on_error([&] {
      engine.meet_on_parameter("engine.full_optimizer_state", parameter, key);
      return at::full({}, static_cast<double>(engine.optimizer->steps(parameter)),
                      at::TensorOptions(at::kFloat).device(engine.world.device()));
    });
  return engine.final_on_error([&] {
    engine.meet_on_parameter("engine.full_optimizer_state", parameter, key);
    return slice(engine.whole_on_device(unit, engine.optimizer->read(unit, key)), info,
                 engine.layout.slot_of(parameter))
        .clone();
  });
}

void Engine::Impl::refuse_lost_writes_anywhere(const std::vector<int>& units) {
  double mine = -1;
  for (int unit : units)
    if (const auto parameter = params->find_lost_write(unit); parameter && mine < 0) mine = *parameter;
  const auto all = rounds->exchange({mine});
  for (std::size_t r = 0; r < all.size(); ++r)
    if (all[r].front() >= 0)
      throw lost_write(layout.parameters[static_cast<std::size_t>(all[r].front())].name(), static_cast<int>(r));
}

// Every rank has the value; each writes the part that it keeps.
void Engine::Impl::write_state(int parameter, const std::string& key, const at::Tensor& value) {
  optimizer->check_key(key);
  const int unit = layout.unit_of(parameter).id;
  const Slot& slot = layout.slot_of(parameter);
  const Range kept = optimizer->kept_range(unit);
  const Range part = intersect(kept, {slot.offset, slot.offset + slot.numel});
  if (part.empty()) return;
  if (key.empty()) params->before_write(unit);
  const Range elements{part.begin - kept.begin, part.end - kept.begin};
  const at::Tensor values = value.reshape({-1}).narrow(0, part.begin - slot.offset, part.size()).to(at::kFloat);
  optimizer->write(unit, key, elements, values);
  if (key.empty() && optimizer->masters_apart(unit))
    params->with_owned(unit, ShardHome::Access::kChange, [&](const at::Tensor& owned) {
      owned.narrow(0, elements.begin, elements.size()).copy_(values);
    });
}

void Engine::set_full_parameter(const std::string& name, const at::Tensor& value) {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.set_full_parameter");
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  check_shape("engine.set_full_parameter", info, value);
  const int unit = engine.layout.unit_of(parameter).id;
  engine.final_on_error([&] {
    engine.meet_on_parameter("engine.set_full_parameter", parameter);
    engine.refuse_lost_writes_anywhere({unit});  // bringing the new values into view would hide them
    if (info.trainable) {
      engine.write_state(parameter, "", value);
      std::vector<bool> written(engine.layout.parameters.size(), false);
      written[static_cast<std::size_t>(parameter)] = true;
      engine.params->publish(unit, written);
      engine.params->finish_publish();
    } else {
      const at::DisableRecordFunctionGuard unobserved;  // an observer would take this for somebody else's write
      engine.params->hold(unit);
      slice(engine.params->full(unit), info, engine.layout.slot_of(parameter)).copy_(value);
      engine.params->adopt(parameter);
      engine.params->let_go(unit);
    }
  });
}

void Engine::set_full_optimizer_state(const std::string& name, const std::string& key, const at::Tensor& value) {
  Impl& engine = running();
  engine.check_usable();
  engine.refuse_in_backward("engine.set_full_optimizer_state");
  const at::NoGradGuard no_grad;
  const int parameter = engine.layout.find(name);
  const ParameterInfo& info = engine.layout.parameters[static_cast<std::size_t>(parameter)];
  check_trainable("engine.set_full_optimizer_state", info);
  if (key == OptimizerStates::kStepKey) {
    const std::int64_t steps = step_count(info, value);
    engine.final_on_error([&] {
      engine.meet_on_parameter("engine.set_full_optimizer_state", parameter, key);
      engine.optimizer->set_steps(parameter, steps);
    });
    return;
  }
  check_shape("engine.set_full_optimizer_state", info, value);
  if (key.empty())
    throw UseError("engine.set_full_optimizer_state",
                   "the key is empty (call set_full_parameter for the master weights)");
  engine.final_on_error([&] {
    engine.meet_on_parameter("engine.set_full_optimizer_state", parameter, key);
    engine.write_state(parameter, key, value);
    engine.optimizer->moments_written(parameter);
  });
}

}  // namespace ballast
