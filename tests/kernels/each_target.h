#pragma once

#include <gtest/gtest.h>

#include <string>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/targets.h"

namespace ballast::kernels::testing {

/// body() once on each instruction set that this CPU has and the passes are compiled for, best first.
template <class Body>
void on_each_target(const Body& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().DeInit();
    EXPECT_EQ(std::string(instruction_set()), hwy::TargetName(target));
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

}  // namespace ballast::kernels::testing
