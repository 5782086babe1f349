#include "ballast/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/instruction_set.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "ballast/kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {

HWY_EXPORT(target_name);

const char* instruction_set() noexcept { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace ballast::kernels
#endif  // HWY_ONCE
