#include <set>

#include "ballast/config/bind.h"

/// What a DeepSpeed user's file holds beyond the keys with effect here.
namespace ballast::schema {

namespace {

using nlohmann::json;

constexpr const char* kFlatLayout = "gradients always live in one flat buffer per unit";
constexpr const char* kTransport = "gradients always travel by all-to-all and parameters by all-gather";
constexpr const char* kFaults = "parameters are gathered when an operator first touches them";
constexpr const char* kCheckpointing = "call ballast::checkpoint(fn, inputs...) in the model";
constexpr const char* kSaving =
    "save_checkpoint and load_checkpoint always write a file a rank and load it on any number of ranks";
constexpr const char* kOneAdam = "the fastest implementation for the device is always used";
constexpr const char* kNormaliser = "gradients are normalised once, in the update";

Allowed any_integer() { return integer(-std::numeric_limits<double>::infinity()); }
Allowed any_number() { return {.kind = Kind::kNumber}; }

}  // namespace

const std::vector<IgnoredKey>& ignored_keys() {
  const std::string zero = "zero_optimization.", offload = zero + "offload_optimizer.", adam = "optimizer.params.",
                    activation = "activation_checkpointing.", saving = "checkpoint.";
  static const std::vector<IgnoredKey> keys{
      {zero + "contiguous_gradients", boolean(), kFlatLayout},
      {zero + "round_robin_gradients", boolean(), kFlatLayout},
      {zero + "allgather_partitions", boolean(), kTransport},
      {zero + "reduce_scatter", boolean(), kTransport},
      {zero + "use_multi_rank_bucket_allreduce", boolean(), kTransport},
      {zero + "legacy_stage1", boolean(), "every stage is a policy on one layout"},
      {zero + "grad_hooks", boolean(), "stages 0 and 1 reduce at the end of the window"},
      {zero + "ignore_unused_parameters", boolean(), "unused parameters are allowed and skipped in every stage"},
      {zero + "load_from_fp32_weights", boolean(), "master weights always come from the fp32 copies"},
      {zero + "elastic_checkpoint", boolean(), kSaving},
      {zero + "pipeline_loading_checkpoint", boolean(), kSaving},
      {zero + "stage3_gather_16bit_weights_on_model_save", boolean(), kSaving},
      {zero + "gather_16bit_weights_on_model_save", boolean(), kSaving},
      {zero + "stage3_gather_fp16_weights_on_model_save", boolean(), kSaving},
      {zero + "stage3_max_reuse_distance", integer(0), kFaults},
      {zero + "max_reuse_distance", integer(0), kFaults},
      {zero + "stage3_module_granularity_threshold", integer(0), kFaults},
      {zero + "module_granularity_threshold", integer(0), kFaults},
      {zero + "stage3_use_all_reduce_for_fetch_params", boolean(), kTransport},
      {zero + "use_all_reduce_for_fetch_params", boolean(), kTransport},
      {zero + "stage3_allgather_sequential", boolean(), kTransport},
      {zero + "allgather_sequential", boolean(), kTransport},
      {zero + "memory_efficient_linear", boolean(), "modules run unmodified"},
      {zero + "override_module_apply", boolean(), "modules run unmodified"},
      {zero + "log_trace_cache_warnings", boolean(), kFaults},
      {zero + "enable_sanity_checks", boolean(), "checks are always on"},
      {zero + "mics_hierarchical_params_gather", boolean(), kTransport},
      {zero + "save_muon_momentum_buffer_in_memory", boolean(), "there is no Muon"},
      {zero + "cpu_offload_use_pin_memory", boolean(),
       "use pin_memory of zero_optimization.offload_optimizer and offload_param"},
      {offload + "fast_init", boolean(), "offloaded states are initialised in one way only"},
      {offload + "convert_grad_on_cpu", boolean(), "gradients are converted in the pass that adds them up"},
      {offload + "cpuadam_cores_perc", number(0), "use zero_optimization.offload_optimizer.threads"},
      {adam + "torch_adam", boolean(), kOneAdam},
      {adam + "fused", or_null(boolean()), kOneAdam},
      {adam + "foreach", or_null(boolean()), kOneAdam},
      {adam + "capturable", boolean(), kOneAdam},
      {adam + "set_grad_none", boolean(), "the engine owns the gradients"},
      {"optimizer.legacy_fusion", boolean(), kOneAdam},
      {"zero_allow_untested_optimizer", boolean(), "every optimizer of this list works in every stage"},
      {"zero_force_ds_cpu_optimizer", boolean(), kOneAdam},
      {"bf16.immediate_grad_update", boolean(), "gradients enter the window in every backward"},
      {"bf16.check_grad_overflow", boolean(), "non-finite gradients skip the step in every dtype"},
      {"bf16.check_overflow", boolean(), "non-finite gradients skip the step in every dtype"},
      {"prescale_gradients", boolean(), kNormaliser},
      {"gradient_predivide_factor", any_number(), kNormaliser},
      {"sparse_gradients", boolean(), "gradients are dense"},
      {"disable_allgather", boolean(), kTransport},
      {"seq_parallel_communication_data_type", or_null(text()), "there is no sequence parallelism"},
      {"use_data_before_expert_parallelism", boolean(), "there is no expert parallelism"},
      {"graph_harvesting", boolean(), "operators are launched one by one"},
      {"dataloader_drop_last", boolean(), "the caller owns the data"},
      {"vocabulary_size", or_null(any_integer()), "it only silences a warning of DeepSpeed's"},
      {"dump_state", boolean(), "`ballast config check` prints the effective configuration"},
      {"memory_breakdown", boolean(), "the ledger always counts memory by kind and tier"},
      {"log_level", or_null(text()), "a program sets its own log sink"},
      {"timers", object(), "wall_clock_breakdown measures a step's parts"},
      {activation + "partition_activations", boolean(), kCheckpointing},
      {activation + "cpu_checkpointing", boolean(), kCheckpointing},
      {activation + "contiguous_memory_optimization", boolean(), kCheckpointing},
      {activation + "number_checkpoints", or_null(any_integer()), kCheckpointing},
      {activation + "synchronize_checkpoint_boundary", boolean(), kCheckpointing},
      {activation + "profile", boolean(), kCheckpointing},
      {saving + "tag_validation", text(), kSaving},
      {saving + "load_universal", boolean(), kSaving},
      {saving + "use_node_local_storage", boolean(), kSaving},
      {saving + "parallel_write", object(), kSaving},
      {saving + "writer", or_null(object()), kSaving},
      {"aio.single_submit", boolean(), "requests that are ready are always handed over together"},
      {"aio.overlap_events", boolean(), "requests are always handed over while others are in flight"},
  };
  return keys;
}

const std::vector<MissingKey>& missing_keys() {
  const std::string zero = "zero_optimization.", adam = "optimizer.params.";
  const char* monitor = "no metrics service is supported; log StepReport's values, or let `ballast train` write them";
  const char* precision = "use bf16.enabled or fp16.enabled";
  const char* quantized = "ZeRO++ is not supported; lower communication_data_type or raise the stage's bucket sizes";
  const char* compression = "compression is not supported; train uncompressed and compress the result";
  const char* curriculum = "data schedules are not supported; choose the data before backward()";
  static const std::vector<MissingKey> keys{
      {"aio.use_gds", "", {false}, "GPUDirect Storage is not supported; states travel through host memory"},
      {"amp", "enabled", {false}, std::string("Apex AMP is not supported; ") + precision},
      {"torch_autocast", "enabled", {false}, std::string("autocast is not supported; ") + precision},
      {"fp16.auto_cast", "", {false}, "inputs are not cast; cast them before the forward"},
      {"fp16.fp16_master_weights_and_grads",
       "",
       {false},
       "master weights are fp32; use "
       "zero_optimization.offload_optimizer.device = \"cpu\" to save device memory"},
      {"bf16.bf16_master_weights_and_grads",
       "",
       {false},
       "master weights are fp32; use "
       "zero_optimization.offload_optimizer.device = \"cpu\" to save device memory"},
      {"bf16.bf16_optimizer_states",
       "",
       {false},
       "optimizer states are fp32; use "
       "zero_optimization.offload_optimizer.device = \"cpu\" to save device memory"},
      {"data_types.param_dtype", "", {nullptr}, precision},
      {"data_types.buffer_dtype", "", {nullptr}, "buffers follow the parameters; cast them in the module"},
      {"gradient_allreduce_op",
       "",
       {"mean"},
       "gradients are averaged; scale the loss by the number of ranks for a sum"},
      {adam + "amsgrad", "", {false}, "AMSGrad is not supported; use AdamW"},
      {adam + "maximize", "", {false}, "ascent is not supported; negate the loss"},
      {adam + "bias_correction", "", {true}, "Adam without bias correction is not supported; use a warm-up schedule"},
      {adam + "fp32_optimizer_states", "", {true}, "optimizer states are fp32; leave it out"},
      {adam + "max_grad_norm", "", {0}, "use gradient_clipping"},
      {zero + "offload_optimizer.super_offload", "", {false}, "leave it out; device = \"cpu\" offloads"},
      {zero + "leaf_module.classes",
       "",
       {json::array()},
       "name modules: zero_optimization.leaf_module.names or "
       "name_suffixes"},
      {zero + "zero_hpz_partition_size", "", {1}, quantized},
      {zero + "zero_quantized_weights", "", {false}, quantized},
      {zero + "zero_quantized_nontrainable_weights", "", {false}, quantized},
      {zero + "zero_quantized_gradients", "", {false}, quantized},
      {zero + "zeropp_loco_param", "", {}, quantized},
      {zero + "mics_shard_size", "", {-1}, "MiCS is not supported; use stage 2 or 3 over all ranks"},
      {zero + "zenflow", "", {}, "ZenFlow is not supported; use zero_optimization.offload_optimizer"},
      {"tensorboard", "enabled", {false}, monitor},
      {"wandb", "enabled", {false}, monitor},
      {"comet", "enabled", {false}, monitor},
      {"csv_monitor", "enabled", {false}, monitor},
      {"comms_logger", "enabled", {false}, "a timeout dumps the last collectives; use a profiler for more"},
      {"flops_profiler", "enabled", {false}, "use wall_clock_breakdown or PyTorch's profiler"},
      {"autotuning", "enabled", {false}, "use `ballast estimate` to choose stage and placement"},
      {"elasticity", "enabled", {false}, "set the batch sizes for the number of ranks"},
      {"hybrid_engine", "enabled", {false}, "generation inside training is the module's own forward"},
      {"nebula", "enabled", {false}, "checkpoint services are not supported; leave it out"},
      {"datastates_ckpt", "", {}, "checkpoint services are not supported; leave it out"},
      {"eigenvalue", "enabled", {false}, compression},
      {"compression_training", "", {json::object()}, compression},
      {"weight_quantization", "", {json::object()}, compression},
      {"quantize_training", "enabled", {false}, compression},
      {"progressive_layer_drop", "enabled", {false}, "drop layers in the model's own forward"},
      {"curriculum_learning", "enabled", {false}, curriculum},
      {"data_efficiency", "enabled", {false}, curriculum},
      {"sparse_attention", "", {json::object()}, "use the model's own attention"},
      {"pipeline", "", {json::object()}, "pipeline parallelism is not supported; use stage 3"},
      {"tensor_parallel", "autotp_size", {0, 1}, "tensor parallelism is not supported; use stage 3"},
      {"expert_parallel",
       "enabled",
       {false},
       "expert parallelism is not supported; use "
       "zero_optimization.leaf_module for experts at stage 3"},
      {"sequence_parallel_size", "", {1}, "sequence parallelism is not supported; use activation checkpointing"},
      {"compile", "deepcompile", {false}, "DeepCompile is not supported; leave it out"},
  };
  return keys;
}

const std::vector<std::string>& known_paths() {
  static const std::vector<std::string> paths = [] {
    std::vector<std::string> all;
    std::set<std::string> sections;
    for (const KeyInfo& key : documented_keys()) {
      all.push_back(key.path);
      if (!key.alias.empty()) all.push_back(key.alias);
    }
    for (const IgnoredKey& key : ignored_keys()) all.push_back(key.path);
    for (const MissingKey& key : missing_keys()) all.push_back(key.path);
    for (const std::string& path : all) {
      for (auto dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1)) {
        sections.insert(path.substr(0, dot));
      }
    }
    for (const std::string& section : sections) {
      if (section.find("[]") == std::string::npos) all.push_back(section);
    }
    return all;
  }();
  return paths;
}

}  // namespace ballast::schema
