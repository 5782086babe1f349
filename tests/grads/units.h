#pragma once

#include <string>
#include <vector>

#include "ballast/grads/policy.h"
#include "ballast/layout/layout.h"

namespace ballast {

struct TestParameter {
  std::string name;  // its unit is what stands before the dot
  std::vector<std::int64_t> shape;
};

inline Layout layout_of(const std::vector<TestParameter>& parameters, int world,
                        c10::ScalarType compute = c10::kFloat) {
  std::vector<ParameterInfo> infos;
  for (const TestParameter& parameter : parameters) {
    ParameterInfo info;
    info.names = {parameter.name};
    info.shape = parameter.shape;
    info.numel = 1;
    for (std::int64_t size : parameter.shape) info.numel *= size;
    info.compute_dtype = compute;
    info.unit = parameter.name.substr(0, parameter.name.find('.'));
    info.leaf = info.unit == "leaf";
    infos.push_back(std::move(info));
  }
  return make_layout(std::move(infos), world);
}

/// Stages 0-3, as the engine sets them up.
inline GradPolicy policy_of(int stage) {
  GradPolicy policy;
  policy.reduce_every_backward = stage >= 2;
  policy.keep_whole_sum = stage == 0;
  policy.equal_calls = stage == 3;
  policy.max_in_flight = 1 << 20;
  return policy;
}

}  // namespace ballast
