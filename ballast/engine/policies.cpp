#include "ballast/engine/policies.h"

#include <algorithm>

#include "ballast/base/error.h"
#include "ballast/base/math.h"

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

constexpr std::int64_t kMostOnDisk = std::int64_t{4} << 20;  // elements of a chunk

Tier tier_of(OffloadDevice device) {
  switch (device) {
    case OffloadDevice::kNone:
      return Tier::kDevice;
    case OffloadDevice::kCpu:
      return Tier::kHost;
    case OffloadDevice::kNvme:
      return Tier::kNvme;
  }
  return Tier::kDevice;
}

}  // namespace

Policies make_policies(const Config& config, int world) {
  const ZeroConfig& zero = config.zero;
  check_placements(zero);

  Policies policies;
  policies.params.updates_whole = zero.stage == 0;
  const OffloadParamConfig& param = zero.offload_param;
  policies.params.shards.tier = tier_of(param.device);
  policies.params.shards.pin_memory = param.pin_memory;
  policies.params.shards.in_host = param.max_in_cpu;
  if (param.buffer_size > 0) policies.params.shards.longest = param.buffer_size;
  policies.params.shards.swap = {.nvme_path = param.nvme_path,
                                 .disk = tiers::disk_options(config.aio),
                                 .buffers = param.buffer_count,
                                 .pin_memory = param.pin_memory};
  // One rank's shard is everything: it faults in only where it doesn't rest on the device.
  policies.params.sharded = zero.stage == 3 && (world > 1 || policies.params.shards.tier != Tier::kDevice);
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

  policies.grads.tier = tier_of(gradient_device(zero));

  policies.optimizer.whole = zero.stage == 0;
  policies.optimizer.masters_apart = policies.params.shards.tier != Tier::kDevice;
  policies.optimizer.tier = tier_of(zero.offload_optimizer.device);
  policies.optimizer.offloaded = zero.offload_optimizer.ratio;
  policies.optimizer.pin_memory = zero.offload_optimizer.pin_memory;
  // A chunk on disk takes a buffer of the ring; in memory it is only the work between two hand-overs.
  const std::int64_t most = policies.optimizer.tier == Tier::kNvme ? kMostOnDisk : kMaxSubGroupSize;
  policies.optimizer.chunk = round_up(std::min(zero.sub_group_size, most), kShardAlign);
  policies.optimizer.swap = {.nvme_path = zero.offload_optimizer.nvme_path,
                             .disk = tiers::disk_options(config.aio),
                             .buffers = zero.offload_optimizer.buffer_count,
                             .read_ahead = zero.offload_optimizer.pipeline_read,
                             .write_behind = zero.offload_optimizer.pipeline_write};
  policies.grads.swap = policies.optimizer.swap;
  policies.grads.swap.nvme_path = zero.offload_gradients.nvme_path;
  return policies;
}

HostSums::Options host_sums_options(const Policies& policies) {
  HostSums::Options options;
  options.accumulate = policies.grads.accumulate;
  options.pin_memory = policies.optimizer.pin_memory;
  if (policies.grads.tier == Tier::kNvme) {
    // Pieces as long as the chunks of the update that reads them.
    options.piece = round_up(std::min(policies.optimizer.chunk, kMostOnDisk), kernels::kSquaresChunk);
    options.swap = policies.grads.swap;
  }
  return options;
}

}  // namespace ballast
