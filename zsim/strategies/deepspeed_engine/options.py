"""Options of DeepSpeed 0.19 by the names that its config has, and those that it has elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zsim.autograd.traced.model import TracedModel
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Optimizer, Precision

VERSION = "0.19"
"""The DeepSpeed that these strategies follow."""

REMOVED = f"expected a key of DeepSpeed {VERSION}, which refuses this one of an older version"
UNMODELLED = f"a key of DeepSpeed {VERSION} that zsim does not model; leave it out"
ELSEWHERE: Mapping[str, str] = {
    "communication_data_type": "this is precision.reduce",
    "gradient_clipping": "this is optimizer.clip_norm",
    "gradient_accumulation_steps": "this is batch.accumulation",
    "train_micro_batch_size_per_gpu": "this is batch.micro_batch",
    "stage": "this is the strategy's name: deepspeed1, deepspeed2 or deepspeed3",
    "cpu_offload": f"{REMOVED}; {VERSION} calls it offload_optimizer",
    "cpu_offload_params": f"{REMOVED}; {VERSION} calls it offload_param",
    "stage3_max_live_params": f"{REMOVED}; {VERSION} calls it stage3_max_live_parameters",
    "grad_accum_dtype": UNMODELLED,
    "use_multi_rank_bucket_allreduce": UNMODELLED,
    "parameter_alignment": UNMODELLED,
    "legacy_stage1": f"{REMOVED}: it ended with 0.5.9",
    "zero_hpz_partition_size": UNMODELLED,
    "zero_quantized_weights": UNMODELLED,
    "zero_quantized_gradients": UNMODELLED,
    "mics_shard_size": UNMODELLED,
}
"""Keys of DeepSpeed's config that are no option here, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """DeepSpeed's own at stages 1 and 2. Sizes count elements.

    `reduce_bucket_size`: gradients reduced at a time, and the size of a buffer that each backward
    makes. `overlap_comm`: reductions run on a stream of their own, from two such buffers.
    `reduce_scatter`: gradients are averaged in slices by owner. `round_robin_gradients`: parameters
    are dealt out to the parts of the flat buffer in turn. `check_grad_overflow`: two-byte gradients
    are searched for infinities before the step; newer releases of 0.19 do by default. They all read
    `allgather_partitions` and `allgather_bucket_size`, and gather the flat buffer at once.
    """

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    allgather_partitions: bool = True
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    reduce_scatter: bool = True
    check_grad_overflow: bool = False


def problems(options: ReplicaOptions, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of options, one line each, the scenario's key first."""
    if not options.contiguous_gradients:
        yield (
            "strategy.contiguous_gradients: expected true, found false, where DeepSpeed "
            f"{VERSION} takes other paths that zsim does not model"
        )
    if options.reduce_bucket_size < 1:
        yield "strategy.reduce_bucket_size: expected at least 1 element, found 0"


def model_problems(
    options: ReplicaOptions, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of `model`, one line each, the scenario's key first."""
    if isinstance(model, TracedModel):
        yield (
            "model.traced: expected a preset, a family or a config.json with DeepSpeed's engine, "
            "whose hooks a trace does not have"
        )
    if model.left_out:
        yield (
            f"model.unused: expected none with DeepSpeed's engine, found {model.left_out[0].fqn} "
            "without a gradient; freeze it"
        )


def precision_problems(precision: Precision) -> Iterator[str]:
    """Refusals of dtypes, one line each, the scenario's key first."""
    if precision.parameters == "float16":
        yield (
            "precision.parameters: expected fp32 or bf16 with DeepSpeed's engine, found fp16, "
            "whose loss scale is not modelled"
        )
