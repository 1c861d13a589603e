"""The schema of scenario files: what each key means, which values it may have, its default.

Types and defaults are those of the dataclasses that tables become. Bounds and meanings are here.

`table_checks` holds tables to the schema, and `reference` prints it. `refusals` knows what keys
mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, create_model

from zsim.cluster.cluster import clusters
from zsim.engine.execution import Execution
from zsim.io.units import UnitError, parse_bytes
from zsim.models.checkpointing import Checkpointing
from zsim.models.families import FAMILIES, presets
from zsim.models.families.layers import LossDtype
from zsim.models.operators import AttentionKind
from zsim.models.repeats import Uses
from zsim.models.training_options import DTYPE_NAMES, Batch, Offload, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario.expect import FIGURES
from zsim.scenario.keys.checkpoint_table import CheckpointTable
from zsim.scenario.keys.table import MAX_NAME, MOST_FAULTS, Pause, Table
from zsim.strategies import STRATEGIES
from zsim.strategies.flat_buffer.groups import Granularity

MAX_SIZE = 10_000_000
"""The largest width, vocabulary or count that a size or an option may have."""
MAX_USES = 64
"""The most often that a block runs in a forward, or a model before a backward."""
MAX_NAMES = 1024
"""The most entries of a list of names or patterns."""
DtypeName = Literal["fp32", "bf16", "fp16"]
Names = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_NAME)], ...], Field(max_length=MAX_NAMES)
]


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


class UsesTable(Table):
    """Runs of each block in a forward: each in a row, or the whole stack again."""

    times: int = Field(ge=1, le=MAX_USES, description="Runs of each block in a forward.")
    order: Literal["block", "stack"] = Field(
        default=Uses().order,
        description="Each block that often in a row, or the whole stack again.",
    )


class ModelTable(Table):
    """The model: one of preset, family with sizes, huggingface, traced."""

    preset: str | None = Field(default=None, description="A model of `zsim list models`.")
    num_layers: int | None = Field(
        default=None, ge=1, description="Blocks of the preset that are kept; all by default."
    )
    attention: AttentionKind | None = Field(
        default=None,
        description="The preset's attention: explicit scores, sdpa with the kernel that torch "
                    "takes, or one of its kernels.",
    )
    loss_dtype: LossDtype | None = Field(
        default=None,
        description="The dtype of the preset's loss: by default the \"model\"'s, or \"float32\", "
                    "as torchtitan and transformers have it.",
    )
    family: str | None = Field(
        default=None, description="A family of models, with its `sizes`."
    )
    sizes: dict[str, Any] = Field(default={}, description="The family's sizes, see below.")
    huggingface: str | None = Field(
        default=None,
        description="The config.json of a Hugging Face gpt2, llama, mistral, qwen2, qwen3, gemma "
                    "or phi3, beside the scenario.",
    )
    traced: str | None = Field(
        default=None, description="The file of a traced nn.Module, beside the scenario."
    )
    uses: Annotated[int, Field(ge=1, le=MAX_USES)] | UsesTable = Field(
        default=1,
        description="Runs of each block in a forward, on the same weights; a table says in which "
                    "`order`.",
    )
    unused: Names = Field(
        default=(), description="Blocks that own parameters and that forward skips."
    )


class ClusterTable(Table):
    """The cluster: a preset or a file, and how much of it."""

    preset: str | None = Field(default=None, description="A cluster of `zsim list clusters`.")
    file: str | None = Field(
        default=None, description="A cluster's file, as `zsim calibrate --out` writes it."
    )
    device: str | None = Field(
        default=None,
        description="Another GPU in the same nodes: a device of `zsim list devices`.",
    )
    nodes: int = Field(default=1, ge=1, le=100_000, description="Nodes of the cluster.")
    ranks: int | None = Field(
        default=None, ge=1, le=1_000_000,
        description="Ranks on a CPU host; on GPUs each device is a rank.",
    )
    nic_bandwidth: str | None = Field(
        default=None,
        description='Bandwidth of each NIC\'s link, as "100 Gbit/s", where the network is '
                    "oversubscribed or shared.",
    )
    power: str | None = Field(
        default=None,
        description='Watts at which each GPU\'s draw is capped, as "500 W"; clocks and products go '
                    "by it, memory does not.",
    )
    fabric: Literal["ib", "roce", "efa", "tcp"] | None = Field(
        default=None,
        description="The kind of network, as far as NCCL's collectives differ by it; by default "
                    "the preset's.",
    )


TABLES: Mapping[str, Any] = {
    "model": ModelTable,
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
    "cluster": ClusterTable,
    "precision": _derived(
        "PrecisionTable", Precision, "The dtypes of training.",
        {
            "parameters": _key("Dtype of compute, unsharded parameters and gradients."),
            "reduce": _key("Dtype in which gradients are reduced."),
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
        "States of zero1 to 3 and deepspeed1 to 3 in host memory, where the optimizer steps, of "
        "zero1 to 3 also on drives; activations in host memory.",
        {
            "optimizer": _key(
                "Place of float32 copies and optimizer states: host memory (cpu), or drives."
            ),
            "parameters": _key(
                "Place of shards of parameters (zero3, deepspeed3); nvme with both there."
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
                "Pinned buffers for drives, each as large as the largest float32 shard: four for "
                "each group in flight.",
                ge=1, le=1024,
            ),
            "pipeline_read": _key("The next group is read while the host steps one."),
            "pipeline_write": _key("A group is written while the host steps the next."),
        },
        {},
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
            "compile": _key("torch.compile fuses chains of element-wise kernels."),
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
                "Matrix products are as fast as in training, or as each kernel alone."
            ),
            "interference": _key("Collectives slow down the kernels that they overlap."),
            "detail": _key(
                "Collectives are simulated as flows, which share links at fair rates, or those on "
                "rings as steps, chunk by chunk, on all ranks."
            ),
            "step_overhead": _key('Pause of the trainer around a step, as "12 ms".'),
            "micro_batch_overhead": _key("Pause of the trainer around each micro-batch."),
            "issue_kernel": _key(
                "Host time to issue one kernel; by default the cluster preset's."
            ),
        },
        {"step_overhead": Pause, "micro_batch_overhead": Pause, "issue_kernel": Pause | None},
    ),
}
"""Tables of fixed keys; `strategy`, `model.sizes` and `expect` depend on what they name."""


class AllocatorTable(Table):
    """torch's caching allocator for CUDA (PYTORCH_CUDA_ALLOC_CONF); on a CPU nothing is reserved
    ahead."""

    expandable_segments: bool = Field(
        default=False,
        description="Segments grow page by page: the same bytes are allocated, fewer reserved.",
    )


class LintTable(Table):
    """`zsim lint` on this scenario."""

    ignore: Names = Field(default=(), description="Rules that are not asked.")


KEYS: dict[str, Any] = {
    "description": (str, Field(default="", description="A sentence on what the scenario shows.")),
    "model": (ModelTable, ...),
    "batch": (TABLES["batch"], ...),
    "cluster": (ClusterTable, ...),
    "strategy": (dict[str, Any], ...),
    **{
        name: (TABLES[name], TABLES[name]())
        for name in (
            "precision", "optimizer", "offload", "activation_checkpointing", "wrapping",
            "execution",
        )
    },
    "frozen": (
        Names,
        Field(default=(), description="Shell-style patterns over the names of parameters that "
                                      "need no gradient."),
    ),
    "faults": (
        tuple[dict[str, Any], ...],
        Field(
            default=(), max_length=MOST_FAULTS,
            description="Faults and stragglers of the steady step, each with its `kind`.",
        ),
    ),
    "allocator": (AllocatorTable, AllocatorTable()),
    "checkpoint": (CheckpointTable, CheckpointTable()),
    "lint": (LintTable, LintTable()),
    "steps": (
        int,
        Field(default=3, ge=1, le=1000, description="Steps of a real run; parameters are compared "
                                                    "after the last."),
    ),
    "seed": (
        int,
        Field(default=0, ge=0, le=2**31, description="Seed of initial parameters and batches."),
    ),
    "expect": (
        dict[str, bool | int | str],
        Field(default={}, description="Assertions about the steady step."),
    ),
}
"""The top level of a scenario; `strategy` has a table of its own, which its name decides."""
ScenarioTable: type[BaseModel] = create_model(
    "ScenarioTable", __base__=Table, __doc__="A whole scenario file.", **KEYS
)


MEANINGS: Mapping[str, str] = {
    "name": "The strategy.",
    "dp_shard": "Ranks that hold one copy of what is sharded; by default as many as there are.",
    "dp_replicate": "Copies, over which gradients are reduced; by default as many as fit.",
    "sync": 'Gradients are reduced after "every" micro-batch, or after the "last" alone.',
    "bucket_cap_mb": "DDP's bucket size in MiB; by default 1 for the first bucket, then 25.",
    "gradient_as_bucket_view": "Gradients are views of DDP's buckets, and no copies.",
    "find_unused_parameters": "DDP searches each forward's graph for parameters without gradient.",
    "form": "The collective that reduces gradients.",
    "granularity": 'A flat buffer for each "unit" or "parameter", or buckets of a size, as '
                   '"25 MiB".',
    "lookahead": "Modules that are gathered ahead.",
    "persistence_threshold": "Parameters of at most so many elements stay whole.",
    "zero2_threshold": "Units of at most so many elements are ZeRO-2's: parameters stay whole.",
    "reshard_after_forward": 'fully_shard\'s own: "auto" frees blocks and not the root; a '
                             "number reshards to so many ranks.",
    "offload": "Sharded parameters, gradients and optimizer states live in host memory, where the "
               "optimizer steps.",
    "all_reduce": 'Gradients are reduced over replicas after "every" micro-batch or the "last".',
    "sharding": '"full" frees blocks after forward, "grad_op" after backward.',
    "forward_prefetch": "fsdp2, hsdp: next blocks that each block gathers; fsdp1: the next block "
                        "is gathered early.",
    "backward_prefetch": "fsdp2, hsdp: previous blocks that each block gathers; fsdp1: when the "
                         "previous block is gathered.",
    "limit_all_gathers": "The host waits while two frees are pending.",
    "use_orig_params": "The optimizer steps the original parameters, not the flat ones.",
    "reduce_bucket_size": "Elements of a bucket of gradients, and of the buffer that holds it.",
    "allgather_bucket_size": "Read and not used by DeepSpeed 0.19.",
    "allgather_partitions": "Read and not used by DeepSpeed 0.19.",
    "overlap_comm": "Gradients are reduced on a stream of their own, from two buffers.",
    "contiguous_gradients": "Gradients are copied into the bucket's buffer; only true is modelled.",
    "round_robin_gradients": "Parameters are dealt out in turn to the parts of the flat buffer.",
    "reduce_scatter": "Gradients are averaged in slices by owner, else bucket by bucket.",
    "stage3_prefetch_bucket_size": "Elements of parameters that are gathered ahead at a time.",
    "stage3_max_live_parameters": "Elements of whole parameters from which on none are gathered "
                                  "ahead.",
    "stage3_max_reuse_distance": "Elements within which a parameter must be used again to stay "
                                 "whole.",
    "stage3_param_persistence_threshold": "Elements of the largest parameters that stay whole.",
    "stage3_model_persistence_threshold": "Elements of all parameters that stay whole.",
    "stage3_module_granularity_threshold": "Leaf modules; only 0 is modelled.",
    "sub_group_size": "Elements that a rank's optimizer steps at a time.",
    "zero_hpz_partition_size": "Ranks over which copies of released parameters are sharded (hpZ).",
    "zero_quantized_weights": "Parameters are gathered in int8 (qwZ), which no run here confirms.",
    "check_grad_overflow": "Gradients of bf16 are searched for infinities before the step.",
    "num_layers": "Blocks.",
    "hidden_size": "Width of the residual stream.",
    "num_heads": "Attention heads of each block.",
    "num_kv_heads": "Heads of keys and values; 0 for as many as `num_heads`.",
    "head_dim": "Width of a head; 0 for hidden_size / num_heads.",
    "feed_forward": "Width inside each feed-forward; 0 for four times `hidden_size`.",
    "vocabulary": "Tokens that the model knows.",
    "max_positions": "Rows of learned positions; 0 for the sequence length.",
    "tied": "The head shares the embedding's weight.",
    "attention": "Kernels of attention.",
    "attention_dropout": "Share of attention's probabilities that dropout makes 0.",
    "residual_dropout": "Share of the outputs of attention and MLP that dropout makes 0.",
    "loss_dtype": 'Dtype of the loss: the "model"\'s, or logits cast to "float32" before it.',
    "qkv_bias": "Projections of queries, keys and values have biases.",
    "output_bias": "The projection of attention's output has a bias.",
    "mlp_bias": "Projections of the feed-forward have biases.",
    "dims": "Widths before, between and after blocks.",
    "hidden": "Width inside each block.",
    "num_classes": "Classes of the classifier.",
}
"""Options of strategies and sizes of families, by key."""


def _fields(options: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass as pydantic wants them: types, defaults and meanings. Sizes are
    bounded, by the `most` of a field's metadata where it has one."""
    hints = get_type_hints(options)
    kinds: dict[Any, Any] = {
        int: Annotated[int, Field(ge=0, le=MAX_SIZE)],
        float: Annotated[float, Field(ge=0, lt=1)],  # a share
        float | None: Annotated[float, Field(ge=0, le=MAX_SIZE)] | None,
        Granularity: BucketSize,
    }
    return {
        field.name: _described(
            field.name,
            Annotated[int, Field(ge=0, le=field.metadata["most"])]
            if "most" in field.metadata
            else kinds.get(hints[field.name], hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(options)
    }


def _described(key: str, kind: Any, default: Any, **bounds: Any) -> tuple[Any, Any]:
    """The entry of `key` in a table of pydantic."""
    return kind, Field(default, description=MEANINGS.get(key), **bounds)


def _bucket_size(written: str) -> str | int:
    """ "unit", "parameter", or a size in bytes from its text."""
    if written in ("unit", "parameter"):
        return written
    try:
        nbytes = parse_bytes(written)
    except UnitError:
        nbytes = 0
    if nbytes < 1:
        raise ValueError('expected "unit", "parameter" or a size as "25 MiB"')
    return nbytes


BucketSize = Annotated[str, AfterValidator(_bucket_size)]
"""A Granularity as scenarios write it."""


@cache
def strategy_table(name: str) -> type[BaseModel]:
    """The schema of `strategy` for one strategy: the common keys and the strategy's own options."""
    strategy = STRATEGIES[name]
    own: dict[str, Any] = {
        axis: _described(axis, int | None, None, ge=1, le=1_000_000) for axis in strategy.axes
    }
    own |= _fields(strategy.options)
    own |= {
        "name": _described("name", Literal[name], ...),
        "sync": _described("sync", Literal[strategy.syncs], strategy.syncs[0]),
    }
    return create_model(
        f"strategy {name}",
        __base__=Table,
        **own,
    )


@cache
def sizes_table(family: str) -> type[BaseModel]:
    """The schema of `model.sizes` for one family."""
    return create_model(f"sizes of {family}", __base__=Table, **_fields(FAMILIES[family].sizes))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files: one variant of `strategy` per strategy, of `model` per
    family and source."""
    from zsim.scenario.keys.fault_tables import FAULT_TABLES  # start-up: few scenarios have faults

    schema = ScenarioTable.model_json_schema()
    schema["title"] = "zsim scenario"
    schema["properties"]["strategy"] = {
        "oneOf": [strategy_table(name).model_json_schema() for name in STRATEGIES]
    }
    schema["properties"]["faults"]["items"] = {
        "oneOf": [table.model_json_schema() for table in FAULT_TABLES.values()]
    }
    model = schema["$defs"]["ModelTable"]["properties"]
    cluster = schema["$defs"]["ClusterTable"]["properties"]
    sizes = [sizes_table(name).model_json_schema() for name in FAMILIES]
    for table, key, values in (
        (model, "preset", {"enum": list(presets()), "title": "Preset"}),
        (model, "family", {"enum": list(FAMILIES), "title": "Family"}),
        (model, "sizes", {"anyOf": sizes}),
        (cluster, "preset", {"enum": list(clusters()), "title": "Preset"}),
    ):
        table[key] = values | {"description": table[key]["description"]}
    schema["properties"]["expect"]["propertyNames"] = {"enum": list(FIGURES)}
    return schema
