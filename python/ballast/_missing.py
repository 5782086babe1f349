"""What DeepSpeedEngine has and Engine hasn't, with what to do instead: the text of the AttributeError, and of the table in
docs/from_deepspeed.md. Names are those of DeepSpeed's runtime/engine.py at edaa722 (August 2026)."""

import sys

_CONFIGURED = "read engine.config, the configuration with all defaults"
_PARALLEL = "there is data parallelism only; its rank and size are global_rank and world_size"
_OFFERED_ELSEWHERE = "this feature isn't there; docs/config.md names an alternative beside its configuration key"

_GROUPS = {
    "backward() and step() reduce; to delay it use no_sync() or coalesce_grad_reduction()": (
        "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain "
        "buffered_allreduce_fallback sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"
    ),
    "pass training_data= to ballast.initialize": (
        "deepspeed_io is_iterable_style_dataset is_map_style_dataset set_data_post_process_func dataloader_drop_last"
    ),
    "call torch.compile on the model, before or after ballast.initialize": (
        "compile compile_autosp compile_autotp compile_zero_optimization_stage get_compile_time is_compiled "
        "is_deepcompile_active is_deepcompile_enabled get_deepcompile_backend get_deepspeed_compile_backend "
        "get_autosp_backend get_autotp_backend register_compile_pass uses_parallelization_pass_only graph_harvesting"
    ),
    "call load_checkpoint(load_module_only=True), or write inside zero.GatheredParameters": (
        "load_module_state_dict load_moe_state_dict"
    ),
    "load_checkpoint() reads a checkpoint of any number of ranks, stage and placement": "load_universal_checkpoint",
    "call save_16bit_model(), or read inside zero.GatheredParameters": "module_state_dict",
    "call save_16bit_model()": "save_fp16_model",
    "engine(...) brings the loss scale into a plain loss.backward(); or call engine.backward(loss)": "scale",
    "leave the windows to the caller: managed_gradient_accumulation = false": (
        "set_train_batch_size set_train_micro_batch_size"
    ),
    "set steps_per_print or wall_clock_breakdown in the configuration": (
        "get_wall_clock_timers active_timers print_forward_breakdown"
    ),
    "memory() has the bytes by kind and tier": "memory_breakdown empty_partition_cache",
    "keep a set of your own, and read engine.config": "dump_state swap_tensor_config get_type",
    _PARALLEL: (
        "get_data_parallel_rank get_model_parallel_rank get_sequence_parallel_group get_tensor_parallel_rank autotp_size "
        "is_elastic_model_parallel_supported is_first_weights_partition_group tensor_parallel_config"
    ),
    _OFFERED_ELSEWHERE: (
        "amp_enabled amp_params autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step curriculum_enabled_legacy "
        "curriculum_learning_config curriculum_learning_enabled curriculum_params_legacy data_efficiency_config "
        "data_efficiency_enabled data_sampling_config data_sampling_enabled eigenvalue_enabled "
        "eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num eigenvalue_max_iter "
        "eigenvalue_stability eigenvalue_tol eigenvalue_verbose elasticity_enabled flops_profiler_detailed "
        "flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step "
        "flops_profiler_recompute_fwd_factor flops_profiler_top_modules get_pld_theta pld_enabled pld_gamma pld_params "
        "pld_theta quantize_training random_ltd_config random_ltd_enabled random_ltd_initialize "
        "set_custom_curriculum_learning_schedule sparse_gradients_enabled super_offload torch_autocast_dtype "
        "torch_autocast_enabled torch_autocast_lower_precision_safe_modules use_node_local_storage zenflow_config "
        "zeropp_loco_param mics_shard_size zero_hpz_partition_size zero_quantized_gradients "
        "zero_quantized_nontrainable_weights zero_quantized_weights"
    ),
    _CONFIGURED: (
        "aio_config bf16_master_weights_and_gradients bf16_optimizer_states checkpoint_serialization_enabled "
        "checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled clip_fp32_gradients "
        "communication_data_type cpuadam_cores_perc dynamic_loss_scale dynamic_loss_scale_args fp16_auto_cast "
        "fp16_master_weights_and_gradients get_data_types gradient_predivide_factor initial_dynamic_scale "
        "is_sanity_checks_enabled log_level optimizer_legacy_fusion optimizer_name optimizer_params postscale_gradients "
        "scheduler_name scheduler_params steps_per_print wall_clock_breakdown zero_allgather_bucket_size "
        "zero_allgather_partitions zero_allgather_sequential zero_allow_untested_optimizer zero_contiguous_gradients "
        "zero_cpu_offload zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save "
        "zero_grad_hooks zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights "
        "zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold "
        "zero_module_granularity_threshold zero_multi_rank_bucket_allreduce zero_nvme_offload_optimizer "
        "zero_offload_optimizer zero_offload_param zero_optimization_partition_gradients "
        "zero_optimization_partition_weights zero_overlap_comm zero_param_persistence_threshold zero_partial_offload "
        "zero_prefetch_bucket_size zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients "
        "zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_use_cpu_optimizer"
    ),
}

MISSING: dict[str, str] = {name: instead for instead, names in _GROUPS.items() for name in names.split()}
GROUPS: dict[str, list[str]] = {instead: names.split() for instead, names in _GROUPS.items()}

_FUNCTION_GROUPS = {
    "parameters are gathered when an operator touches them, wherever they are used": (
        "zero.register_external_parameter zero.unregister_external_parameter"
    ),
    "use `torch.nn.Linear`, and stage 3 over all ranks": "zero.TiledLinear zero.MiCS_Init",
    'use the calls with "full"': (
        "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state "
        "utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state"
    ),
    "name them in the configuration: zero_optimization.leaf_module.names or name_suffixes": (
        "utils.set_z3_leaf_modules utils.unset_z3_leaf_modules utils.get_z3_leaf_modules utils.z3_leaf_module"
    ),
    'use `torch.device("meta")` or `zero.Init`': "OnDevice",
    "use `torch.utils.checkpoint`, both kinds": "checkpointing",
    "the class is `ballast.Engine`": "DeepSpeedEngine",
    "the engine chooses the fastest implementation: pass a `torch.optim` optimizer or name one in the configuration": "ops",
    "use the model's own experts, as leaf modules: zero_optimization.leaf_module": "moe",
    "use `torch.distributed`": "comm",
    "there is training only": "init_inference tp_model_init default_inference_config",
    "there is data parallelism only": "PipelineModule",
    "use `torch.accelerator`": "get_accelerator",
}
FUNCTIONS: dict[str, str] = {name: instead for instead, names in _FUNCTION_GROUPS.items() for name in names.split()}


class _Imports:
    """For `from ballast import comm` and `import ballast.ops.adam`, which don't show what a module's __getattr__ says."""

    @staticmethod
    def find_spec(full_name: str, path=None, target=None) -> None:
        package, _, name = full_name.partition(".")
        if package == __package__ and name in FUNCTIONS:
            raise ModuleNotFoundError(f"ballast has no {name}: {FUNCTIONS[name]}")


sys.meta_path.append(_Imports)
