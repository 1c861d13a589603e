"""Tables of a scenario that become dataclasses: what each key means and which values it may have.

Types and defaults are those of the dataclasses. Bounds and meanings are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from zsim.engine.execution import Execution
from zsim.models.checkpointing import Checkpointing
from zsim.models.training_options import DTYPE_NAMES, Batch, Offload, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario.keys.table import MAX_SIZE, MAX_USES, Names, Pause, Request, Table

DtypeName = Literal["fp32", "bf16", "fp16"]


def _key(meaning: str, **bounds: Any) -> dict[str, Any]:
    """Meaning and bounds, which the schema adds to a field of a dataclass."""
    return {"description": meaning, **bounds}


def _derived(
    name: str, kind: type[Any], meaning: str, keys: Mapping[str, dict[str, Any]],
    types: Mapping[str, Any],
) -> Any:
    """The table `name` that becomes the dataclass `kind`: types and defaults are the dataclass's,
    but for `types`."""
    hints = get_type_hints(kind)
    own: Any = {
        key: (types.get(key, hints.get(key)), Field(_default(kind, key), **described))
        for key, described in keys.items()
    }
    return create_model(name, __base__=Table, __doc__=meaning, **own)


def _default(kind: type[Any], key: str) -> Any:
    """The default of the field `key` as a scenario writes it: dtypes by their short names, times
    with their unit."""
    defaults = {field.name: field.default for field in fields(kind)}
    if key not in defaults:
        time = defaults[f"{key}_ns"]
        return None if time is None else f"{time} ns"
    value: Any = defaults[key]
    if value is MISSING:
        return ...
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else value  # type: ignore[call-overload]


TRAINING_TABLES: Mapping[str, Any] = {
    "batch": _derived(
        "BatchTable", Batch, "One rank's batch.",
        {
            "micro_batch": _key("Sequences or samples of a micro-batch.", ge=1, le=1_000_000),
            "sequence_length": _key("Tokens of a sequence; 1 for mlp.", ge=1, le=10_000_000),
            "accumulation": _key("Micro-batches of a step.", ge=1, le=10_000),
            "forwards": _key(
                "Forwards of a micro-batch, on different inputs, before one backward of their "
                "summed losses.",
                ge=1, le=MAX_USES,
            ),
        },
        {},
    ),
    "precision": _derived(
        "PrecisionTable", Precision, "The dtypes of training.",
        {
            "parameters": _key("Dtype of compute, unsharded parameters and gradients."),
            "reduce": _key(
                "Dtype in which gradients are reduced; of ddp by a hook, as fp16_compress_hook."
            ),
            "autocast": _key(
                "Dtype of torch.autocast around forward; parameters stay fp32, and so do "
                "all-gathers."
            ),
            "master": _key(
                "The optimizer steps float32 copies (or shards) of two-byte parameters; false: "
                "them themselves, as after model.to(torch.bfloat16)."
            ),
        },
        {
            "parameters": DtypeName, "reduce": DtypeName,
            "autocast": Literal["none", "bf16", "fp16"],
        },
    ),
    "optimizer": _derived(
        "OptimizerTable", Optimizer, "The optimizer, as torch.optim names it.",
        {
            "name": _key("The algorithm."),
            "implementation": _key("torch's loop over parameters."),
            "learning_rate": _key("lr of torch.optim.", ge=0),
            "momentum": _key("Momentum of sgd.", ge=0, lt=1),
            "weight_decay": _key("weight_decay of torch.optim.", ge=0),
            "clip_norm": _key(
                "Global norm to which gradients are clipped before each step; 0 for none.", ge=0
            ),
        },
        {},
    ),
    "offload": _derived(
        "OffloadTable", Offload,
        "States of zero1 to 3 and deepspeed1 to 3 in host memory, of all but deepspeed1 and "
        "deepspeed2 also on drives. Activations in host memory.",
        {
            "optimizer": _key(
                "Place of float32 copies and optimizer states: host memory (cpu), or drives."
            ),
            "parameters": _key(
                "Place of shards of parameters: of zero3 with the optimizer there too, of "
                "deepspeed3 also without; nvme with both there."
            ),
            "activations": _key(
                "Activations in host memory: all that autograd saves, as by torch's save_on_cpu; "
                "or inputs of checkpointed blocks, copied beside compute as by torchtune's hook."
            ),
            "pin_memory": _key(
                "The host's side of copies is pinned: they are faster, and run beside compute."
            ),
            "adam": _key(
                "The step on the host: torch's, by `optimizer.implementation`, or that of "
                "DeepSpeedCPUAdam, in one pass."
            ),
            "buffer_count": _key(
                "Pinned buffers for drives, each of the largest float32 shard, or sub-group of "
                "deepspeed3: four for each group in flight, or fewer (deepspeed3 with sgd).",
                ge=1, le=1024,
            ),
            "max_in_cpu": _key(
                "Elements of a rank's parameters that deepspeed3 keeps in host memory, and not on "
                "drives.", ge=0, le=10**12,
            ),
            "parameter_buffer_count": _key(
                "Buffers of deepspeed3 for parameters from drives, each until its parameter is "
                "released.", ge=1, le=1024,
            ),
            "parameter_buffer_size": _key("Elements of each of them.", ge=1, le=10**12),
            "pipeline_read": _key("The next group is read while the host steps one."),
            "pipeline_write": _key("A group is written while the host steps the next."),
            "block_size": _key(
                'Size of each request to drives, as "1 MiB"; without this and `queue_depth` drives '
                "are as fast as the cluster's file says."
            ),
            "queue_depth": _key(
                "Requests of a rank that drives have at once; 8 with a `block_size` alone. Of "
                "DeepSpeed it is queue_depth times intra_op_parallelism.",
                ge=1, le=2**20,
            ),
        },
        {"block_size": Request | None},
    ),
    "activation_checkpointing": _derived(
        "CheckpointingTable", Checkpointing,
        "Blocks and operators that are recomputed in backward instead of kept.",
        {
            "mode": _key(
                "full recomputes whole blocks from their inputs; selective needs `save` or "
                "`recompute`."
            ),
            "every": _key("Every how many blocks one is recomputed.", ge=1, le=MAX_SIZE),
            "save": _key(
                "Operators of a recomputed block whose outputs are kept: linear, attention."
            ),
            "save_every": _key(
                "The first of each so many saved linears is kept; 2 is torchtitan's policy.",
                ge=1, le=MAX_SIZE,
            ),
            "recompute": _key("Operators that are recomputed alone, everything else is kept."),
            "early_stop": _key(
                "Recomputation stops after the last tensor that backward needs, as torch does "
                "since 2.1."
            ),
        },
        {"save": Names, "recompute": Names},
    ),
    "wrapping": _derived(
        "WrappingTable", Wrapping, "The modules of each param group (unit).",
        {
            "every": _key(
                "Consecutive blocks in one unit; \"all\" makes the whole model one."
            ),
            "ends": _key(
                "Embedding, last norm and head belong to the root's unit, or are units apart."
            ),
            "nested": _key("Modules of each block that are units inside the block's unit."),
        },
        {"every": Annotated[int, Field(ge=1, le=MAX_SIZE)] | Literal["all"], "nested": Names},
    ),
    "execution": _derived(
        "ExecutionTable", Execution,
        "Execution of the step: it changes time alone, but for `norms` and `loss`, whose forms "
        "keep other tensors.",
        {
            "compile": _key(
                "torch.compile fuses chains of element-wise kernels of the model and its loss, or "
                'of "blocks" alone; bytes are those of eager ones.'
            ),
            "float8": _key(
                "Linears but the head multiply in 8 bits, by a recipe: delayed (Transformer "
                "Engine's; true), or torchao's tensorwise, rowwise or mx."
            ),
            "float8_casts": _key(
                "Casts to float8 are fused with what comes before (Transformer Engine, "
                "torch.compile), or kernels of their own (eager torchao)."
            ),
            "float32_products": _key(
                "Products of float32 factors on CUDA: ieee, or tf32 as "
                "torch.backends.cuda.matmul.fp32_precision allows."
            ),
            "attention_kernels": _key(
                "The kernels of fused attention on CUDA: FlashAttention 2 or 3, Triton's, or "
                "cuDNN's, which torch 2.11 took on Hopper."
            ),
            "norms": _key(
                "RMSNorms are torch's, or composite of single calls, as LlamaRMSNorm and torch "
                "before 2.9; `compile` fuses either."
            ),
            "loss": _key(
                "The cross-entropy is torch's, or composite of single calls, as Megatron's, which "
                "keeps the softmax and makes the gradient in it; `compile` fuses either."
            ),
            "accumulation": _key(
                "Later gradients are added in their own dtype, in fp32, or fused into products; "
                "the latter two in fp32 buffers, with fp32 in ZeRO's Program."
            ),
            "softmax": _key(
                "Explicit attention scales and masks scores in kernels apart, or fused with the "
                "softmax as Megatron does."
            ),
            "products": _key(
                "Matrix products are as fast as in training on 8 GPUs of a node, or as each alone; "
                "by default alone on a single GPU."
            ),
            "interference": _key("Collectives slow down the kernels that they overlap."),
            "detail": _key(
                "Collectives are simulated as flows, which share links at fair rates, or those on "
                "rings as steps, chunk by chunk, on all ranks."
            ),
            "step_overhead": _key('Pause of the trainer around a step, as "12 ms".'),
            "micro_batch_overhead": _key("Pause of the trainer around each micro-batch."),
            "issue_kernel": _key(
                "Host time to issue one kernel or operator of a model; by default the preset's of "
                "each."
            ),
            "host_threads": _key(
                "Threads of each rank's optimizer on the host, as OMP_NUM_THREADS; by default "
                "torchrun's 1 of several ranks, else a part of the node's cores.",
                ge=1, le=100_000,
            ),
        },
        {"step_overhead": Pause, "micro_batch_overhead": Pause, "issue_kernel": Pause | None},
    ),
}
"""Tables that become dataclasses, by key."""
