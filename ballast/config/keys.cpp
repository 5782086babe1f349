#include "ballast/base/error.h"
#include "ballast/config/bind.h"

namespace ballast::schema {

namespace {

using nlohmann::json;

// In the order of the enums.
const std::vector<std::string> kDTypes{"fp32", "bf16", "fp16"};
const std::vector<std::string> kOptimizers{"Adam", "AdamW", "SGD", "Lion"};
const std::vector<std::string> kSchedulers{"none", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};

const std::vector<std::string> kRated{"WarmupLR", "WarmupDecayLR"};  // schedules between two given rates
const std::vector<std::string> kEnding{"WarmupDecayLR", "WarmupCosineLR"};
const std::vector<std::string> kAnySchedule{"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
const std::vector<std::string> kCosine{"WarmupCosineLR"};

constexpr const char* kAdaptive = "use AdamW, Adam, SGD or Lion";
constexpr const char* kWarmups = "use WarmupLR, WarmupDecayLR or WarmupCosineLR, or Engine::set_lr before each step";

using Keys = std::vector<Key<Config>>;

void add_batch(Keys& keys) {
  keys.push_back(bind<Config>(
      {.path = "train_batch_size",
       .allowed = or_null(integer(1)),
       .meaning = "Samples a step over all ranks: micro-batch x accumulation steps x ranks. Two of the three suffice."},
      [](auto& c) -> auto& { return c.train_batch_size; }));
  keys.push_back(bind<Config>(
      {.path = "train_micro_batch_size_per_gpu",
       .allowed = or_null(integer(1)),
       .meaning = "Samples a backward on one rank."},
      [](auto& c) -> auto& { return c.train_micro_batch_size_per_gpu; }));
  keys.push_back(bind<Config>(
      {.path = "gradient_accumulation_steps",
       .allowed = or_null(integer(1)),
       .meaning = "Micro-batches a step. Managed windows have this length; gradients are divided "
                  "by it unless the caller gives weights."},
      [](auto& c) -> auto& { return c.gradient_accumulation_steps; }));
  keys.push_back(bind<Config>(
      {.path = "managed_gradient_accumulation",
       .allowed = boolean(),
       .meaning = "true: the engine counts micro-batches and step() acts when the window is "
                  "full. false: the caller owns the window, every step() ends it."},
      [](auto& c) -> auto& { return c.managed_gradient_accumulation; }));
  keys.push_back(bind<Config>(
      {.path = "gradient_clipping",
       .allowed = number(0),
       .meaning = "Greatest 2-norm of the whole gradient; a longer one is scaled down. 0: off "
                  "(DeepSpeed's documentation: 1.0)."},
      [](auto& c) -> auto& { return c.gradient_clipping; }));
}

void add_precision(Keys& keys) {
  keys.push_back(bind<Config>(
      {.path = "bf16.enabled",
       .allowed = boolean(),
       .meaning = "Compute in bf16 with fp32 master weights.",
       .alias = "bfloat16.enabled"},
      [](auto& c) -> auto& { return c.bf16; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.enabled",
       .allowed = boolean(),
       .meaning = "Compute in fp16 with fp32 master weights and loss scaling. Not with bf16."},
      [](auto& c) -> auto& { return c.fp16.enabled; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.loss_scale", .allowed = number(0), .meaning = "A fixed loss scale; 0: dynamic."},
      [](auto& c) -> auto& { return c.fp16.loss_scale; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.initial_scale_power",
       .allowed = integer(0, 60),
       .meaning = "The dynamic scale starts at 2 to this power."},
      [](auto& c) -> auto& { return c.fp16.initial_scale_power; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.loss_scale_window",
       .allowed = integer(1),
       .meaning = "Steps without overflow, behind a first one, after which the scale doubles."},
      [](auto& c) -> auto& { return c.fp16.loss_scale_window; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.hysteresis",
       .allowed = integer(1, 1e9),
       .meaning = "Overflows that it takes until the scale halves."},
      [](auto& c) -> auto& { return c.fp16.hysteresis; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.consecutive_hysteresis",
       .allowed = boolean(),
       .meaning = "true: every step without overflow refills the hysteresis. false: only a "
                  "growth of the scale does."},
      [](auto& c) -> auto& { return c.fp16.consecutive_hysteresis; }));
  keys.push_back(bind<Config>(
      {.path = "fp16.min_loss_scale",
       .allowed = {.kind = Kind::kNumber, .min = 0, .open_min = true},
       .meaning = "The dynamic scale never falls below; an overflow at this scale is an error."},
      [](auto& c) -> auto& { return c.fp16.min_loss_scale; }));
  keys.push_back(bind<Config>(
      {.path = "data_types.grad_accum_dtype",
       .allowed = choice(kDTypes),
       .meaning = "In which gradients of several backwards are summed (DeepSpeed: the compute "
                  "type)."},
      [](auto& c) -> auto& { return c.grad_accum_dtype; }));
  keys.push_back(bind<Config>(
      {.path = "communication_data_type",
       .allowed = or_null(choice(kDTypes)),
       .meaning = "In which gradients travel between ranks. null: the compute type, fp32 for "
                  "sums of several backwards."},
      [](auto& c) -> auto& { return c.communication_data_type; }));
}

Key<Config> adam_w_mode_key() {
  Key<Config> key;
  key.info = {.path = "optimizer.params.adam_w_mode",
              .allowed = boolean(),
              .meaning =
                  "true: type Adam is AdamW (decoupled decay), as in DeepSpeed. false: Adam as published, decay "
                  "in the gradient.",
              .fallback = "true",
              .only_with = {"Adam", "AdamW"}};
  key.read = [allowed = key.info.allowed](Config& config, const json& value, const std::string& path) {
    const bool decoupled = read_bool(value, allowed, path);
    if (!decoupled && config.optimizer.type == OptimizerType::kAdamW) {
      throw ConfigError("config.parse", "contradiction (", path,
                        " = false with optimizer.type = \"AdamW\"; use type \"Adam\", or leave adam_w_mode out)");
    }
    if (decoupled) config.optimizer.type = OptimizerType::kAdamW;
  };
  key.write = [](const Config& config) { return json(config.optimizer.type != OptimizerType::kAdam); };
  return key;
}

void add_optimizer(Keys& keys) {
  keys.push_back(bind<Config>(
      {.path = "optimizer.type",
       .allowed = choice(kOptimizers),
       .meaning = "The update rule. Adam means AdamW unless optimizer.params.adam_w_mode is "
                  "false.",
       .refused = {{"Adagrad", kAdaptive},
                   {"Lamb", kAdaptive},
                   {"Muon", kAdaptive},
                   {"OneBitAdam", kAdaptive},
                   {"OneBitLamb", kAdaptive},
                   {"ZeroOneAdam", kAdaptive},
                   {"MuAdam", kAdaptive},
                   {"MuAdamW", kAdaptive},
                   {"MuSGD", kAdaptive}}},
      [](auto& c) -> auto& { return c.optimizer.type; }));
  keys.push_back(adam_w_mode_key());
  for (const auto& hyper : hyper_keys()) {
    Key<Config> key;
    key.info = hyper.info;
    key.info.path = "optimizer.params." + key.info.path;
    key.read = [read = hyper.read](Config& config, const json& value, const std::string& path) {
      read(config.optimizer.hyper, value, path);
    };
    key.write = [write = hyper.write](const Config& config) { return write(config.optimizer.hyper); };
    keys.push_back(std::move(key));
  }
  Key<Config> groups;
  groups.info = {.path = "optimizer.params.groups",
                 .allowed = {.kind = Kind::kGroups},
                 .meaning = "Own key: parameters with other values than the optimizer's own, by name.",
                 .fallback = "[]"};
  groups.read = [](Config& config, const json& value, const std::string& path) {
    config.optimizer.groups = read_groups(config, value, path);
  };
  groups.write = write_groups;
  keys.push_back(std::move(groups));
}

void add_scheduler(Keys& keys) {
  const std::string params = "scheduler.params.";
  keys.push_back(bind<Config>(
      {.path = "scheduler.type",
       .allowed = choice(kSchedulers),
       .meaning = "How the learning rates move with the applied steps; none: they stay.",
       .refused = {{"LRRangeTest", kWarmups}, {"OneCycle", kWarmups}}},
      [](auto& c) -> auto& { return c.scheduler.type; }));
  keys.push_back(bind<Config>(
      {.path = params + "warmup_min_lr",
       .allowed = number(0),
       .meaning = "Rate at the start of the warm-up, for every group.",
       .only_with = kRated},
      [](auto& c) -> auto& { return c.scheduler.warmup_min_lr; }));
  keys.push_back(bind<Config>(
      {.path = params + "warmup_max_lr",
       .allowed = or_null(number(0)),
       .meaning = "Rate at the end of the warm-up, for every group. null: each group's own lr "
                  "(WarmupLR), 0.001 (WarmupDecayLR).",
       .only_with = kRated},
      [](auto& c) -> auto& { return c.scheduler.warmup_max_lr; }));
  keys.push_back(bind<Config>(
      {.path = params + "warmup_num_steps",
       .allowed = integer(1),
       .meaning = "Length of the warm-up in applied steps; 1 counts as 2.",
       .only_with = kAnySchedule},
      [](auto& c) -> auto& { return c.scheduler.warmup_num_steps; }));
  keys.push_back(bind<Config>(
      {.path = params + "warmup_type",
       .allowed = choice({"log", "linear"}),
       .meaning = "Shape of the warm-up.",
       .only_with = kAnySchedule},
      [](auto& c) -> auto& { return c.scheduler.warmup_type; }));
  keys.push_back(bind<Config>(
      {.path = params + "total_num_steps",
       .allowed = integer(1),
       .meaning = "Applied steps of the whole run, the warm-up included.",
       .fallback = "required",
       .only_with = kEnding},
      [](auto& c) -> auto& { return c.scheduler.total_num_steps; }));
  keys.push_back(bind<Config>(
      {.path = params + "warmup_min_ratio",
       .allowed = {.kind = Kind::kNumber, .min = 0, .max = 1},
       .meaning = "Rate at the start of the warm-up, as a part of each group's lr.",
       .only_with = kCosine},
      [](auto& c) -> auto& { return c.scheduler.warmup_min_ratio; }));
  keys.push_back(bind<Config>(
      {.path = params + "cos_min_ratio",
       .allowed = {.kind = Kind::kNumber, .min = 0, .max = 1},
       .meaning = "Rate at the end of the cosine, as a part of each group's lr.",
       .only_with = kCosine},
      [](auto& c) -> auto& { return c.scheduler.cos_min_ratio; }));
  keys.push_back(bind<Config>(
      {.path = params + "last_batch_iteration",
       .allowed = integer(-1),
       .meaning = "Iteration of the schedule that the first applied step uses; -1: before the "
                  "beginning.",
       .only_with = kAnySchedule},
      [](auto& c) -> auto& { return c.scheduler.last_batch_iteration; }));
}

void add_zero(Keys& keys) {
  const std::string zero = "zero_optimization.";
  keys.push_back(bind<Config>(
      {.path = zero + "stage",
       .allowed = integer(0, 3),
       .meaning = "What is sharded over the ranks: 0 nothing, 1 optimizer states, 2 and "
                  "gradients, 3 and parameters."},
      [](auto& c) -> auto& { return c.zero.stage; }));
  keys.push_back(bind<Config>(
      {.path = zero + "overlap_comm",
       .allowed = boolean(),
       .meaning = "Communicate while computing. Results don't depend on it (DeepSpeed: true "
                  "only at stage 3)."},
      [](auto& c) -> auto& { return c.zero.overlap_comm; }));
  keys.push_back(bind<Config>(
      {.path = zero + "reduce_bucket_size",
       .allowed = integer(1),
       .meaning = "Greatest number of gradient elements in flight."},
      [](auto& c) -> auto& { return c.zero.reduce_bucket_size; }));
  keys.push_back(bind<Config>(
      {.path = zero + "allgather_bucket_size",
       .allowed = integer(1),
       .meaning = "Greatest number of updated parameter elements in flight."},
      [](auto& c) -> auto& { return c.zero.allgather_bucket_size; }));
  keys.push_back(bind<Config>(
      {.path = zero + "stage3_max_live_parameters",
       .allowed = integer(0),
       .meaning = "Greatest number of gathered parameter elements on a rank; the oldest leave "
                  "first.",
       .alias = zero + "max_live_parameters"},
      [](auto& c) -> auto& { return c.zero.stage3_max_live_parameters; }));
  keys.push_back(bind<Config>(
      {.path = zero + "stage3_prefetch_bucket_size",
       .allowed = integer(0),
       .meaning = "Parameter elements gathered ahead of their use; 0: none.",
       .alias = zero + "prefetch_bucket_size"},
      [](auto& c) -> auto& { return c.zero.stage3_prefetch_bucket_size; }));
  keys.push_back(bind<Config>(
      {.path = zero + "stage3_param_persistence_threshold",
       .allowed = integer(0),
       .meaning = "Units with at most so many elements stay gathered.",
       .alias = zero + "param_persistence_threshold"},
      [](auto& c) -> auto& { return c.zero.stage3_param_persistence_threshold; }));
  keys.push_back(bind<Config>(
      {.path = zero + "stage3_model_persistence_threshold",
       .allowed = integer(0),
       .meaning = "Greatest number of elements that stay gathered for that reason.",
       .alias = zero + "model_persistence_threshold"},
      [](auto& c) -> auto& { return c.zero.stage3_model_persistence_threshold; }));
  keys.push_back(bind<Config>(
      {.path = zero + "leaf_module.names",
       .allowed = texts(),
       .meaning = "Modules gathered whole at stage 3, by full dotted name: those whose children "
                  "run data-dependently (experts)."},
      [](auto& c) -> auto& { return c.zero.leaf_module.names; }));
  keys.push_back(bind<Config>(
      {.path = zero + "leaf_module.name_suffixes", .allowed = texts(), .meaning = "The same by the end of the name."},
      [](auto& c) -> auto& { return c.zero.leaf_module.name_suffixes; }));
}

void add_reports(Keys& keys) {
  keys.push_back(bind<Config>(
      {.path = "steps_per_print",
       .allowed = integer(0),
       .meaning = "Window ends between two lines of progress in the log; 0: none."},
      [](auto& c) -> auto& { return c.steps_per_print; }));
  keys.push_back(bind<Config>(
      {.path = "wall_clock_breakdown", .allowed = boolean(), .meaning = "Measure and log the parts of a step."},
      [](auto& c) -> auto& { return c.wall_clock_breakdown; }));
  keys.push_back(bind<Config>(
      {.path = "comm_timeout_seconds",
       .allowed = {.kind = Kind::kNumber, .min = 0, .max = 1e6, .open_min = true},
       .meaning = "Own key: how long a rank waits for its peers before it ends with an error; a world's own timeout "
                  "counts where it is shorter."},
      [](auto& c) -> auto& { return c.comm_timeout_seconds; }));
}

}  // namespace

const Keys& config_keys() {
  static const Keys keys = [] {
    Keys all;
    add_batch(all);
    add_precision(all);
    add_optimizer(all);
    add_scheduler(all);
    add_zero(all);
    all.insert(all.end(), offload_keys().begin(), offload_keys().end());
    all.insert(all.end(), aio_keys().begin(), aio_keys().end());
    add_reports(all);
    return all;
  }();
  return keys;
}

bool applies(const KeyInfo& key, const Config& config) {
  if (key.only_with.empty()) return true;
  const std::string& optimizer = kOptimizers[static_cast<std::size_t>(config.optimizer.type)];
  const std::string& scheduler = kSchedulers[static_cast<std::size_t>(config.scheduler.type)];
  for (const std::string& type : key.only_with) {
    if (type == optimizer || type == scheduler) return true;
  }
  return false;
}

}  // namespace ballast::schema
