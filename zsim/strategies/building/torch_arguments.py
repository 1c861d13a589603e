"""Arguments and calls of torch's wrappers that are no options of their strategies: the scenario's
own key instead, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping

_UNMODELLED = "not modelled; leave it out"
_WRAPPING = "this is the table wrapping: units of blocks, every so many, or nested in them"
_PRECISION = 'this is the table precision: { parameters = "bf16", reduce = "fp32" }'
_LAST = 'this is sync = "last": gradients are reduced after the last micro-batch alone'
_MESH = "sizes of the mesh are dp_shard and, of hsdp and fsdp1, dp_replicate"
_REPLICAS = "all ranks are one group, of replicas; leave it out"
_IDLE = "changes no byte and no time of a step; leave it out"
_HOOK = (
    'torch\'s fp16_compress_hook and bf16_compress_hook are precision.reduce = "fp16" or "bf16"; '
    "PowerSGD and other hooks are not modelled"
)
OF_DDP: Mapping[str, str] = {
    "static_graph": "changes the first two steps alone, in which torch then reduces behind the "
                    "backward; leave it out",
    **dict.fromkeys(("comm_hook", "ddp_comm_hook", "register_comm_hook"), _HOOK),
    **dict.fromkeys(("no_sync", "require_backward_grad_sync"), _LAST),
    "broadcast_buffers": "torch's default, true, is what is modelled; leave it out",
    **dict.fromkeys(("process_group", "device_mesh"), _REPLICAS),
    **dict.fromkeys((
        "device_ids", "output_device", "dim", "init_sync", "check_reduction",
    ), _IDLE),
    **dict.fromkeys((
        "mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce",
        "skip_all_reduce_unused_params", "bucket_cap_mb_list", "batched_grad_copy",
        "forward_sync_buffers", "parameters_as_bucket_view", "overlap_with_ddp",
    ), _UNMODELLED),
}
"""Arguments of DistributedDataParallel and ZeroRedundancyOptimizer."""
OF_FSDP1: Mapping[str, str] = {
    "sharding_strategy": 'this is sharding: "full" is FULL_SHARD, over replicas HYBRID_SHARD, and '
                         '"grad_op" SHARD_GRAD_OP; NO_SHARD is the strategy ddp',
    "auto_wrap_policy": _WRAPPING,
    "mixed_precision": _PRECISION,
    "cpu_offload": "torch's CPUOffload is not modelled; fsdp2 has offload = true",
    **dict.fromkeys(("ignored_modules", "ignored_states", "ignored_parameters"), _UNMODELLED),
    **dict.fromkeys(("device_mesh", "process_group"), _MESH),
    **dict.fromkeys(("sync_module_states", "param_init_fn", "device_id"), _IDLE),
    "no_sync": _LAST,
    "reshard_after_forward": 'this is sharding: "full" for true, "grad_op" for false',
}
"""Arguments of FullyShardedDataParallel."""
OF_FULLY_SHARD: Mapping[str, str] = {
    "mp_policy": _PRECISION,
    "offload_policy": "CPUOffloadPolicy is offload = true",
    "cpu_offload": "CPUOffloadPolicy is offload = true",
    **dict.fromkeys(("mesh", "dp_mesh_dims"), _MESH),
    "shard_placement_fn": "shards of another dimension than the first are not modelled; leave it "
                          "out",
    "set_requires_gradient_sync": _LAST,
    "set_requires_all_reduce": 'this is all_reduce = "last" of hsdp',
    "set_modules_to_forward_prefetch": "this is forward_prefetch, the number of modules",
    "set_modules_to_backward_prefetch": "this is backward_prefetch, the number of modules",
    "set_reshard_after_forward": "this is reshard_after_forward",
    "set_reshard_after_backward": "parameters that stay whole after backward are not modelled",
    **dict.fromkeys((
        "ignored_params", "set_all_reduce_hook", "set_allocate_memory_from_process_group_for_comm",
        "set_custom_all_gather", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor", "set_is_last_backward", "set_post_optim_event",
        "set_reduce_scatter_divide_factor", "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params", "set_separate_reduce_scatter_group",
        "set_symm_mem_for_comm", "set_unshard_in_backward",
    ), _UNMODELLED),
    "sharding": 'this is reshard_after_forward: true for "full", false for "grad_op"',
}
"""Arguments of fully_shard."""
