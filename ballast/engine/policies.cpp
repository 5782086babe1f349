#include "ballast/engine/policies.h"

namespace ballast {
namespace {

c10::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return c10::kBFloat16;
    case DType::kFloat16:
      return c10::kHalf;
    default:
      return c10::kFloat;
  }
}

}  // namespace

Policies make_policies(const Config& config, int world) {
  const ZeroConfig& zero = config.zero;
  const Tier states_tier = zero.offload_optimizer.device == OffloadDevice::kCpu ? Tier::kHost : Tier::kDevice;

  Policies policies;
  policies.params.updates_whole = zero.stage == 0;
  policies.params.sharded = zero.stage == 3 && world > 1;  // one rank's shard is everything
  policies.params.limits = {zero.stage3_max_live_parameters, zero.stage3_prefetch_bucket_size};
  policies.params.persistent_unit = zero.stage3_param_persistence_threshold;
  policies.params.persistent_total = zero.stage3_model_persistence_threshold;
  policies.params.publish_in_flight = zero.overlap_comm ? zero.allgather_bucket_size : 0;

  policies.grads.reduce_every_backward = zero.stage >= 2;
  policies.grads.keep_whole_sum = zero.stage == 0;
  policies.grads.equal_calls = zero.stage == 3;
  policies.grads.overlap = zero.overlap_comm;
  policies.grads.max_in_flight = zero.reduce_bucket_size;
  policies.grads.accumulate = scalar_type(config.grad_accum_dtype);
  if (config.communication_data_type) policies.grads.communicate = scalar_type(*config.communication_data_type);
  policies.grads.tier = states_tier;

  policies.optimizer.whole = zero.stage == 0;
  policies.optimizer.tier = states_tier;
  policies.optimizer.pin_memory = zero.offload_optimizer.pin_memory;
  return policies;
}

}  // namespace ballast
