"""Keys of DeepSpeed's config that are no options of its strategies: the scenario's own key instead,
or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from zsim.strategies.deepspeed_engine.options import VERSION

_UNMODELLED = f"a key of DeepSpeed {VERSION} that zsim does not model; leave it out"
_MICS = "ended with 0.19.7; hsdp shards over a part of the ranks likewise"
REMOVED: Mapping[str, str] = {
    "mics_shard_size": _MICS,
    "mics_hierarchical_params_gather": _MICS,
    "zeropp_loco_param": f"ended within {VERSION}; zsim does not model it",
    "legacy_stage1": "ended with 0.5.9",
    "cpu_offload_params": f"named offload_param in {VERSION}",
    "stage3_max_live_params": f"named stage3_max_live_parameters in {VERSION}",
}
"""Keys that DeepSpeed refuses and that older versions or texts have, with what became of them."""
BESIDE_ZERO = (
    "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "disable_allgather",
    "fp32_allreduce", "gradient_allreduce_op", "managed_gradient_accumulation",
    "seq_parallel_communication_data_type", "disable_python_gc",
)
"""Keys that DeepSpeed's config has outside zero_optimization."""
_LOADED = "an option of checkpoints, which changes no step; leave it out (zsim checkpoint)"
_CHECK = "a check or a log, which changes no step; leave it out"
_SCALE = (
    'scales of the loss change no byte and no time; precision.parameters = "fp16" has one, leave '
    "this out"
)
_OFFLOADED = 'this is the table offload: offload = { optimizer = "cpu", adam = "deepspeed" }'
_PARAMETERS = 'this is offload.parameters = "cpu" of deepspeed3'
_BOTH: Mapping[str, str] = {
    "communication_data_type": "this is precision.reduce",
    "gradient_clipping": "this is optimizer.clip_norm",
    "gradient_accumulation_steps": "this is batch.accumulation",
    "train_micro_batch_size_per_gpu": "this is batch.micro_batch",
    "train_batch_size": "this is batch.micro_batch times batch.accumulation times the ranks",
    "stage": "this is the strategy's name: deepspeed1, deepspeed2 or deepspeed3",
    "zero_optimization": "put its keys into strategy, beside the name",
    "fp16": 'this is precision.parameters = "fp16"',
    "bf16": 'this is precision.parameters = "bf16"',
    **dict.fromkeys((
        "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale",
        "consecutive_hysteresis",
    ), _SCALE),
    "offload_optimizer": _OFFLOADED,
    "cpu_offload": f"{_OFFLOADED}; DeepSpeed {VERSION} calls it offload_optimizer",
    "cpu_offload_use_pin_memory": "this is offload.pin_memory",
    "offload_param": _PARAMETERS,
    "cpu_offload_param": f"{_PARAMETERS}; DeepSpeed {VERSION} calls it offload_param",
    **{
        key: f"expected a key of DeepSpeed {VERSION}, which refuses this one of an older version, "
             f"{why}"
        for key, why in REMOVED.items()
    },
    "memory_efficient_linear": "zsim models and observes DeepSpeed's default, true; leave it out",
    **dict.fromkeys((
        "elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
    ), _LOADED),
    **dict.fromkeys((
        "ignore_unused_parameters", "log_trace_cache_warnings",
    ), _CHECK),
    "enable_sanity_checks": "broadcasts of stage 3 before each reduction, which are not modelled; "
                            "leave it out",
    **dict.fromkeys((
        "grad_accum_dtype", "use_multi_rank_bucket_allreduce", "parameter_alignment",
        "compute_grad_norm", "override_module_apply", "zero_quantized_nontrainable_weights",
        "zenflow", "super_offload", "save_muon_momentum_buffer_in_memory",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        *BESIDE_ZERO,
    ), _UNMODELLED),
}
OF_REPLICAS: Mapping[str, str] = {
    **_BOTH,
    **dict.fromkeys((
        "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "sub_group_size", "zero_hpz_partition_size",
        "zero_quantized_weights", "zero_quantized_gradients", "leaf_module",
        "trace",
    ), "an option of stage 3, which stages 1 and 2 do not read; leave it out, or take deepspeed3"),
}
"""Keys that stages 1 and 2 do not have."""
OF_SHARDS: Mapping[str, str] = {
    **_BOTH,
    "round_robin_gradients": "an option of stages 1 and 2, which stage 3 does not read; leave it "
                             "out",
    "check_grad_overflow": "zsim models it at stages 1 and 2; leave it out",
}
"""Keys that stage 3 does not have."""
