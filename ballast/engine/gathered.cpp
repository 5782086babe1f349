// gathered(): full values of sharded parameters in place, for code that reads by pointer or writes.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <set>
#include <string>

#include "ballast/base/error.h"
#include "ballast/engine/impl.h"
#include "ballast/engine/rank_likeness.h"

namespace ballast {
namespace {

std::vector<int> indices_of(const Layout& layout, const ParamStore& params, const std::vector<at::Tensor>& tensors) {
  std::vector<int> result;
  for (std::size_t p = 0; tensors.empty() && p < layout.parameters.size(); ++p) result.push_back(static_cast<int>(p));
  for (const at::Tensor& tensor : tensors) {
    std::size_t p = 0;
    const auto is_it = [&](const at::Tensor& other) { return other.is_same(tensor); };
    while (p < layout.parameters.size()) {
      const std::vector<at::Tensor>& those = params.tensors(static_cast<int>(p));
      if (std::any_of(those.begin(), those.end(), is_it)) break;
      ++p;
    }
    if (p == layout.parameters.size())
      throw UseError("engine.gathered", "a tensor is not a parameter of this engine's module (shape ",
                     tensor.defined() ? c10::str(tensor.sizes()) : "undefined",
                     "; pass tensors from module->parameters())");
    result.push_back(static_cast<int>(p));
  }
  // In one order on all ranks, whichever the caller's was (a set has another one in each process).
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

/// Lets go of what gathered() held, also when its end throws.
struct Held {
  ParamStore& params;
  const std::set<int>& units;
  ~Held() {
    for (int unit : units) params.let_go(unit);
  }
};

std::set<int> units_of(const Layout& layout, const std::vector<int>& parameters) {
  std::set<int> units;
  for (int p : parameters) units.insert(layout.unit_of(p).id);
  return units;
}

}  // namespace

ScopeGuard Engine::gathered(const std::vector<at::Tensor>& params, std::optional<int> writer) {
  Impl& engine = running();
  engine.check_usable();
  if (writer && (*writer < 0 || *writer >= engine.world.size()))
    throw UseError("engine.gathered", "there is no such rank (writer ", *writer, ", world size ", engine.world.size(),
                   ")");
  const std::vector<int> parameters = indices_of(engine.layout, *engine.params, params);
  engine.final_on_error([&] {
    const std::set<int> units = units_of(engine.layout, parameters);
    if (!units.empty()) engine.meet(Call::kGathered, *units.begin());
    std::string request = std::to_string(writer.value_or(-1));
    for (int p : parameters) request += "," + std::to_string(p);
    check_same_request(*engine.rounds, "engine.gathered", "name the same parameters and writer on all ranks", request);
    for (int unit : units) engine.params->hold(unit);
  });
  return engine.guard([&engine, parameters, writer] { engine.end_gathered(parameters, writer); });
}

void Engine::Impl::end_gathered(const std::vector<int>& parameters, std::optional<int> writer) {
  const at::NoGradGuard no_grad;
  const std::set<int> units = units_of(layout, parameters);
  const Held held{*params, units};
  if (!writer || failure) return;
  final_on_error([&] {
    if (!units.empty()) meet(Call::kGathered, *units.begin());
    for (int p : parameters) {
      // An observer would take the broadcast for somebody else's write.
      const at::DisableRecordFunctionGuard unobserved;
      const Unit& unit = layout.unit_of(p);
      const Slot& slot = layout.slot_of(p);
      const at::Tensor values = params->full(unit.id).narrow(0, slot.offset, slot.numel);
      gather->broadcast(values, *writer, "parameter " + layout.parameters[static_cast<std::size_t>(p)].name()).wait();
      if (unit.trainable) write_state(p, "", values);
      params->adopt(p);
    }
    refuse_lost_writes_anywhere({units.begin(), units.end()});  // to others of these units, which nobody named
  });
}

}  // namespace ballast
