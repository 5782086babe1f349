#pragma once

#include <c10/core/Device.h>

#include "ballast/engine/save_plan.h"

namespace ballast {

/// States of LibTorch's default random generators that a rank's operators draw from, bytes on the host: "cpu", and the
/// device's where that is another.
NamedTensors generator_states(c10::Device device);
/// Takes them up again; those that aren't there here are left out.
void restore_generators(c10::Device device, const NamedTensors& states);

}  // namespace ballast
