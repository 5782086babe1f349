#include "ballast/engine/generators.h"

#include <ATen/Context.h>

#include <mutex>

namespace ballast {
namespace {

template <class Fn>
void for_generators(c10::Device device, Fn&& fn) {
  const auto visit = [&](const char* name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());  // other threads draw from it
    fn(name, generator);
  };
  visit("cpu", at::globalContext().defaultGenerator(c10::kCPU));
  if (!device.is_cpu()) visit("device", at::globalContext().defaultGenerator(device));
}

}  // namespace

NamedTensors generator_states(c10::Device device) {
  NamedTensors states;
  for_generators(device, [&](const char* name, const at::Generator& generator) {
    states.emplace_back(name, generator.get_state().cpu().contiguous());
  });
  return states;
}

void restore_generators(c10::Device device, const NamedTensors& states) {
  for_generators(device, [&](const char* name, at::Generator& generator) {
    for (const auto& [known, state] : states)
      if (known == name) generator.set_state(state);
  });
}

}  // namespace ballast
