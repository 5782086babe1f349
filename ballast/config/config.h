#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ballast {

/// A floating-point type that the engine keeps or sends.
enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };

/// Optimizer names of the schema: "Adam", "AdamW", "SGD", "Lion" (any case).
enum class OptimizerType : std::uint8_t { kAdam, kAdamW, kSgd, kLion };

/// Hyper-parameters of one parameter group. Meanings are those of torch.optim's class of the same name (Lion: Chen et
/// al., 2023), defaults those of DeepSpeed's: no decay, and Lion's beta2 is 0.999.
struct OptimizerHyper {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;  // Adam, AdamW, Lion (which has no eps)
  double weight_decay = 0;                        // Adam, SGD: added to the gradient; AdamW, Lion: decoupled
  double momentum = 0, dampening = 0;             // SGD
  bool nesterov = false;                          // SGD

  bool operator==(const OptimizerHyper&) const = default;
};

/// One entry of `optimizer.params.groups`: parameters whose name matches one of the patterns (shell wildcards, first
/// group that matches wins) take these values; the others take the optimizer's own.
struct OptimizerGroup {
  std::vector<std::string> patterns;
  OptimizerHyper hyper;

  bool operator==(const OptimizerGroup&) const = default;
};

/// In JSON, "Adam" is kAdamW unless optimizer.params.adam_w_mode is false: DeepSpeed's documented behaviour.
struct OptimizerConfig {
  OptimizerType type = OptimizerType::kAdamW;
  OptimizerHyper hyper;
  std::vector<OptimizerGroup> groups;

  bool operator==(const OptimizerConfig&) const = default;
};

enum class SchedulerType : std::uint8_t { kNone, kWarmupLr, kWarmupDecayLr, kWarmupCosineLr };
enum class WarmupType : std::uint8_t { kLog, kLinear };

inline constexpr double kWarmupDecayMaxLr = 0.001;  // DeepSpeed's default

struct SchedulerConfig {
  SchedulerType type = SchedulerType::kNone;
  double warmup_min_lr = 0;  // WarmupLR, WarmupDecayLR
  /// The same two. Unset: each group's own lr (WarmupLR), kWarmupDecayMaxLr (WarmupDecayLR).
  std::optional<double> warmup_max_lr = std::nullopt;
  std::int64_t warmup_num_steps = 1000;
  WarmupType warmup_type = WarmupType::kLog;
  std::int64_t total_num_steps = 0;                     // WarmupDecayLR, WarmupCosineLR: required there
  double warmup_min_ratio = 0, cos_min_ratio = 0.0001;  // WarmupCosineLR, relative to each group's lr
  std::int64_t last_batch_iteration = -1;               // where the schedule starts; -1: before its beginning

  bool operator==(const SchedulerConfig&) const = default;
};

struct Fp16Config {
  bool enabled = false;
  double loss_scale = 0;  // 0: dynamic
  int initial_scale_power = 16;
  std::int64_t loss_scale_window = 1000;
  int hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;

  bool operator==(const Fp16Config&) const = default;
};

/// Where a kind of model state lives, and what it costs there.
enum class OffloadDevice : std::uint8_t {
  kNone,  // memory of the compute device
  kCpu,   // host memory: a copy each way, under the backward and the next forward
  kNvme,  // a swap file below nvme_path: a read and a write more, through a ring of buffers in host memory
};

/// Master weights and optimizer states; in every stage. What is not offloaded is updated on the compute device.
struct OffloadOptimizerConfig {
  OffloadDevice device = OffloadDevice::kNone;
  bool pin_memory = true;  // page-locked where the compute device is an accelerator; no effect where it is the CPU
  std::string nvme_path;   // folder of the swap file; required at kNvme, no effect elsewhere
  double ratio = 1;        // in [0, 1]: share of the states that is offloaded; the first units in forward order stay
  bool pipeline_read = true, pipeline_write = true;  // kNvme: read ahead of, and write behind, the update
  int buffer_count = 4;                              // kNvme: chunks of the ring, >= 2
  int threads = 0;  // of the host's update; 0: processors this process may use / ranks on the host

  bool operator==(const OffloadOptimizerConfig&) const = default;
};

/// Parameter shards in the compute dtype; at stage 3 only.
struct OffloadParamConfig {
  OffloadDevice device = OffloadDevice::kNone;
  bool pin_memory = true;                   // as for the optimizer
  std::string nvme_path;                    // as for the optimizer
  int buffer_count = 5;                     // kNvme: buffers between disk and device, >= 2
  std::int64_t buffer_size = 0;             // kNvme: elements of one of them at most; 0: as the longest shard wants
  std::int64_t max_in_cpu = 1'000'000'000;  // kNvme: elements of a rank that stay in host memory

  bool operator==(const OffloadParamConfig&) const = default;
};

/// kAuto: kCpu where the optimizer states are offloaded, else kNone.
enum class GradientDevice : std::uint8_t { kAuto, kNone, kCpu, kNvme };

/// Own key: the window's sums of gradient shards.
struct OffloadGradientsConfig {
  GradientDevice device = GradientDevice::kAuto;
  std::string nvme_path;  // as for the optimizer

  bool operator==(const OffloadGradientsConfig&) const = default;
};

/// Modules that are gathered whole as one unit because their children are used data-dependently (experts).
struct LeafModuleConfig {
  std::vector<std::string> names;          // full dotted names: "blocks.3.moe"
  std::vector<std::string> name_suffixes;  // "moe"

  bool operator==(const LeafModuleConfig&) const = default;
};

/// Greatest zero_optimization.sub_group_size: reading a larger one gives this one.
inline constexpr std::int64_t kMaxSubGroupSize = 16'777'216;

struct ZeroConfig {
  int stage = 0;
  bool overlap_comm = true;
  std::int64_t reduce_bucket_size = 500'000'000;     // elements of gradients in flight at most
  std::int64_t allgather_bucket_size = 500'000'000;  // elements of updated parameters in flight at most
  std::int64_t stage3_max_live_parameters = 1'000'000'000;
  std::int64_t stage3_prefetch_bucket_size = 50'000'000;
  std::int64_t stage3_param_persistence_threshold = 100'000;
  std::int64_t stage3_model_persistence_threshold = std::numeric_limits<std::int64_t>::max();
  LeafModuleConfig leaf_module;
  OffloadOptimizerConfig offload_optimizer;
  OffloadParamConfig offload_param;
  OffloadGradientsConfig offload_gradients;
  std::int64_t sub_group_size = kMaxSubGroupSize;  // elements of a chunk of an update or of disk I/O at most, >= 64

  bool operator==(const ZeroConfig&) const = default;
};

/// How swap files are read and written.
struct AioConfig {
  std::int64_t block_size = 1 << 20;  // bytes
  int queue_depth = 8;
  int intra_op_parallelism = 4;  // threads, where io_uring is refused

  bool operator==(const AioConfig&) const = default;
};

/// A run's configuration in DeepSpeed's JSON schema; docs/config.md describes every key. Immutable facts of one run:
/// the engine never writes to it. Reading one throws ConfigError with the key's path, the value and what is allowed.
struct Config {
  std::optional<std::int64_t> train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;
  bool managed_gradient_accumulation = true;
  double gradient_clipping = 0;  // 0: off
  Fp16Config fp16;
  bool bf16 = false;
  DType grad_accum_dtype = DType::kFloat32;
  std::optional<DType> communication_data_type;  // unset: each unit's compute dtype
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  ZeroConfig zero;
  AioConfig aio;
  std::int64_t steps_per_print = 10;  // 0: never
  bool wall_clock_breakdown = false;
  double comm_timeout_seconds = 600;  // own key: how long a rank waits for its peers
  std::vector<std::string> notices;   // keys accepted without effect, each with the reason; printed once at start

  static Config from_file(const std::filesystem::path& file);
  static Config from_string(const std::string& json);
  /// at: what the paths in errors and notices begin with, "engine." for a section of a larger file.
  static Config from_json(const nlohmann::json& json, const std::string& at = "");

  /// The effective configuration: every key that applies, defaults filled in. from_json() of it gives an equal Config
  /// (without the notices).
  nlohmann::json to_json() const;

  bool operator==(const Config&) const = default;
};

/// to_json() as indented text, for people.
std::string describe(const Config& config);

/// Where gradient sums lie: offload_gradients.device, kAuto resolved.
OffloadDevice gradient_device(const ZeroConfig& zero);

/// Throws ConfigError where placements contradict each other or the stage, or a swap file has no folder; it names the
/// keys and the remedy. Reading a configuration calls it; a Config filled in code has to be passed to it. at: as in
/// Config::from_json.
void check_placements(const ZeroConfig& zero, const std::string& at = "");

/// The batch triangle: train_batch_size = micro_batch * accumulation_steps * world.
struct BatchShape {
  std::int64_t train_batch, micro_batch, accumulation_steps;
};

/// Fills in what the configuration leaves open, as DeepSpeed does. Throws ConfigError with all three numbers and the
/// world size where they contradict each other or don't divide. With nothing given: micro-batch 1, one step.
BatchShape resolve_batch(const Config& config, int world_size);

/// Throws ConfigError where the numbers of the triangle fit no number of ranks at all: what can be said before the
/// ranks are known. at: as in Config::from_json.
void check_batch(const Config& config, const std::string& at = "");

}  // namespace ballast
