"""Keys of libraries' own configs that a scenario's tables do not have, and the reason."""

from __future__ import annotations

from collections.abc import Mapping

_CONTIGUOUS = (
    "expected none: DeepSpeed's goes with partition_activations, and without ranks of tensor "
    "parallelism its buffers are as many bytes as the checkpoints, earlier; use "
    "allocator.expandable_segments = true"
)
_OF_SIZES = (
    "presets have no dropout; sizes of your own may: "
    'model = {{ family = "gpt", sizes = {{ …, {key} = 0.1 }} }}'
)
_STATE = 'expected the state as the key: offload = { optimizer = "cpu", parameters = "cpu" }'
SHARED_MODELS = (
    "tensor, pipeline, context and expert parallelism are not modelled; strategy has the axes "
    "dp_shard and dp_replicate"
)
"""The refusal of ranks that share one model."""
_OUTPUTS = (
    "torch's defaults are modelled: inputs are cast to the dtype of parameters, outputs are as "
    "they come; leave it out"
)
FOREIGN_KEYS: Mapping[str, str] = {
    "aio": "two keys of offload, block_size and queue_depth",
    "zero_optimization": "a key of DeepSpeed's config, which zsim import deepspeed FILE reads",
    "strategy.offload": (
        "an option of fsdp2 and hsdp; zero1 to 3 and deepspeed1 to 3 have the table offload: "
        'offload = { optimizer = "cpu" }'
    ),
    **{f"offload.{key}": _STATE for key in ("device", "offload_optimizer", "offload_param")},
    "offload.buffer_size": "this is offload.parameter_buffer_size, in elements",
    "offload.nvme_path": (
        "drives are those of the cluster's file, [drives]; a real run writes below TMPDIR"
    ),
    "offload.ratio": "a part of the states alone is not modelled; leave it out",
    **{f"offload.{key}": "threads for drives are not modelled; leave it out" for key in (
        "thread_count", "intra_op_parallelism", "single_submit", "overlap_events",
    )},
    **{f"model.{key}": _OF_SIZES.format(key=key) for key in (
        "attention_dropout", "residual_dropout"
    )},
    "model.dropout": _OF_SIZES.format(key="attention_dropout"),
    "parallelism": SHARED_MODELS,
    "precision.output_dtype": _OUTPUTS,
    "precision.cast_forward_inputs": _OUTPUTS,
    "precision.buffer_dtype": "buffers stay as the module makes them; leave it out",
    **{f"optimizer.{key}": f'this is optimizer.implementation = "{word}"' for key, word in (
        ("fused", "fused"), ("foreach", "foreach"),
    )},
    **{f"optimizer.{key}": "changes no byte and no time; leave it out" for key in (
        "betas", "eps", "dampening",
    )},
    **{f"optimizer.{key}": "not modelled; leave it out" for key in (
        "amsgrad", "capturable", "differentiable", "maximize", "nesterov",
    )},
    "activation_checkpointing.partition_activations": (
        "expected none: ranks of tensor parallelism have the same activations and may keep 1/N "
        "each, but scenarios have none yet; N data-parallel ranks have their own, of which N parts "
        'of 1/N are as many bytes, sent twice; use offload.activations = "checkpoint_inputs"'
    ),
    "activation_checkpointing.contiguous_memory_optimization": _CONTIGUOUS,
    "activation_checkpointing.number_checkpoints": _CONTIGUOUS,
    "activation_checkpointing.cpu_checkpointing": (
        'this is offload.activations = "checkpoint_inputs"'
    ),
}
