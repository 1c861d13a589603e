"""Options of DeepSpeed 0.19 by the names that its config has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from zsim.autograd.traced.model import TracedModel
from zsim.ir.mesh import Mesh
from zsim.models.called_modules import granular, is_leaf
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.repeats import repeats
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NAMES, Optimizer, Precision
from zsim.strategies.building.parameters import used_parameters

VERSION = "0.19"
"""The DeepSpeed that these strategies follow."""

MOST_ELEMENTS = 10**12
"""The largest size of an option, in elements."""
ALIGNMENT = 8
"""Elements that groups of quantized parameters and gradients have a multiple of."""
HALF = "float16"
_SIZE = {"most": MOST_ELEMENTS}

HOOKS = 0.4
"""Host's time of the engine's hooks of one module that gathers, over that of FSDP's of a unit of
nine parameters. On one processor they take 0.16 ms in forward and in backward, where FSDP's take
0.40 for each of its collectives (DeepSpeed 0.19.8, stage 3, one gloo rank)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """DeepSpeed's own at stages 1 and 2. Sizes count elements."""

    reduce_bucket_size: int = field(default=500_000_000, metadata=_SIZE)
    """Elements that are reduced at a time, and of the buffer that each backward makes for them."""
    allgather_bucket_size: int = field(default=500_000_000, metadata=_SIZE)
    """Read and not used by DeepSpeed 0.19."""
    allgather_partitions: bool = True
    """Read and not used by DeepSpeed 0.19."""
    overlap_comm: bool = False
    """Gradients are reduced on a stream of their own, from two buffers."""
    contiguous_gradients: bool = True
    """Gradients are copied into the bucket's buffer; only true is modelled."""
    round_robin_gradients: bool = False
    """Parameters are dealt out in turn to the parts of the flat buffer."""
    reduce_scatter: bool = True
    """Gradients are averaged in slices by owner, else bucket by bucket."""
    check_grad_overflow: bool = True
    """Gradients of bf16 are searched for infinities before the step, as those of fp16 always are.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """DeepSpeed's own at stage 3. Sizes count elements of whole parameters, but for
    `sub_group_size`, which counts a rank's."""

    reduce_bucket_size: int = field(default=500_000_000, metadata=_SIZE)
    """Elements that are reduced at a time, and of the buffer that is always there for them."""
    allgather_bucket_size: int = field(default=500_000_000, metadata=_SIZE)
    """Read and not used by DeepSpeed 0.19."""
    allgather_partitions: bool = True
    """Read and not used by DeepSpeed 0.19."""
    overlap_comm: bool = True
    """Gathers and reductions have streams of their own."""
    contiguous_gradients: bool = True
    """Gradients are copied into the bucket's buffer; only true is modelled."""
    reduce_scatter: bool = True
    """Gradients are averaged in slices by owner, else bucket by bucket."""
    stage3_prefetch_bucket_size: int = field(default=50_000_000, metadata=_SIZE)
    """Elements of parameters that are gathered ahead at each step of the trace."""
    stage3_max_live_parameters: int = field(default=1_000_000_000, metadata=_SIZE)
    """Elements of whole parameters from which on none are gathered ahead."""
    stage3_max_reuse_distance: int = field(default=1_000_000_000, metadata=_SIZE)
    """Elements within which a parameter must be used again to stay whole."""
    stage3_param_persistence_threshold: int = field(default=100_000, metadata=_SIZE)
    """Elements of the largest parameters that stay whole."""
    stage3_model_persistence_threshold: int = field(default=MOST_ELEMENTS, metadata=_SIZE)
    """Elements of all parameters that stay whole."""
    stage3_module_granularity_threshold: int = field(default=0, metadata=_SIZE)
    """Elements a module on average, up to which a module with others inside is a leaf; modelled
    where it takes each block, or none."""
    leaf_module: Literal["none", "blocks"] = "none"
    """Modules whose parameters are gathered and reduced together: each block (set_z3_leaf_modules).
    """
    trace: Literal["holds", "breaks"] = "holds"
    """The recorded order of blocks: it holds, or breaks, as each forward begins with another block;
    leaf_module hides orders inside blocks (MoE)."""
    sub_group_size: int = field(default=1_000_000_000, metadata=_SIZE)
    """Elements that a rank's optimizer steps at a time."""
    zero_hpz_partition_size: int = 1
    """Ranks over which copies of released parameters are sharded, to be gathered until the step
    (hpZ of ZeRO++)."""
    zero_quantized_weights: bool = False
    """Parameters are gathered in int8 (qwZ of ZeRO++), by kernels of GPUs alone."""
    zero_quantized_gradients: bool = False
    """Gradients are reduced in int4 (qgZ of ZeRO++) by all-to-alls inside and between nodes; on one
    node it changes nothing."""


def leaf_blocks(options: ShardOptions | None, model: ModelSpec) -> bool:
    """True where each block of `model` is a leaf module."""
    return options is not None and (
        options.leaf_module == "blocks" or _granular(options, model) == blocks(model)
    )


def _granular(options: ShardOptions, model: ModelSpec) -> set[str]:
    """The leaf modules by mean size."""
    most = options.stage3_module_granularity_threshold
    return set(granular(model, most)) if most else set()


def blocks(model: ModelSpec) -> set[str]:
    """The paths of the blocks of a model `by_module`."""
    return {m.within or m.path for m in model.modules if m.within or is_leaf(m)}


def _of_blocks(model: ModelSpec) -> list[list[Parameter]]:
    """The parameters of each block, in the order of calls."""
    made: dict[str, list[Parameter]] = {}
    inside, known = blocks(model), {p.fqn: p for p in model.parameters}
    for module in model.modules:
        if (path := module.within or module.path) in inside:
            made.setdefault(path, []).extend(map(known.__getitem__, used_parameters(module)))
    return list(made.values())


def _are_alike(model: ModelSpec) -> bool:
    """True with several blocks whose parameters are alike."""
    kinds = [[(p.shape, p.requires_grad) for p in each] for each in _of_blocks(model)]
    return len(kinds) > 1 and all(each == kinds[0] for each in kinds)


def turned(model: ModelSpec) -> dict[str, Parameter]:
    """The parameter of the block before, the last one's for the first, by each block's fqns."""
    of_blocks = _of_blocks(model)
    return {
        parameter.fqn: before
        for own, others in zip(of_blocks, [of_blocks[-1], *of_blocks], strict=False)
        for parameter, before in zip(own, others, strict=True)
    }


def as_config(options: ReplicaOptions | ShardOptions, model: ModelSpec) -> dict[str, Any]:
    """`options` as DeepSpeed's config has them, which names leaf modules one by one."""
    made = asdict(options)
    made.pop("trace", None)
    if made.pop("leaf_module", "none") == "blocks":
        made["leaf_module"] = {"names": [m.path for m in model.modules if is_leaf(m)]}
    return made


def problems(options: ReplicaOptions, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of options, one line each, the scenario's key first."""
    if not options.contiguous_gradients:
        yield (
            "strategy.contiguous_gradients: expected true, found false, where DeepSpeed "
            f"{VERSION} takes other paths that zsim does not model"
        )
    if options.reduce_bucket_size < 1:
        yield "strategy.reduce_bucket_size: expected at least 1 element, found 0"


def precision_problems(precision: Precision) -> Iterator[str]:
    """Refusals of dtypes, one line each, the scenario's key first."""
    if precision.autocast != "none":
        yield (
            "precision.autocast: expected none with DeepSpeed's engine, which switches it off on "
            'GPUs; its own, torch_autocast, is not modelled; use parameters = "bf16"'
        )


def model_problems(
    options: ReplicaOptions, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of `model`, one line each, the scenario's key first."""
    yield from _scalars(model)
    if model.left_out:
        yield (
            f"model.unused: expected none with DeepSpeed's engine, found {model.left_out[0].fqn} "
            "without a gradient; freeze it"
        )


def _scalars(model: ModelSpec) -> Iterator[str]:
    """Refusal of a parameter without dimensions, which DeepSpeed 0.19 cannot view as the bytes that
    it broadcasts."""
    for parameter in model.parameters:
        if not parameter.shape:
            yield (
                f"model: expected parameters of at least one dimension, found {parameter.fqn} "
                f"without, which DeepSpeed {VERSION} fails to broadcast; make it one of shape [1]"
            )
            return


def shard_problems(options: ShardOptions, mesh: Mesh, optimizer: Optimizer) -> Iterator[str]:
    """Refusals of options of stage 3, one line each, the scenario's key first."""
    for name in ("contiguous_gradients", "reduce_scatter"):
        if not getattr(options, name):
            yield f"strategy.{name}: expected true, found false, which zsim does not model"
    for name in ("reduce_bucket_size", "sub_group_size"):
        if getattr(options, name) < 1:
            yield f"strategy.{name}: expected at least 1 element, found 0"
    if options.trace == "breaks" and options.stage3_module_granularity_threshold:
        yield (
            'strategy.stage3_module_granularity_threshold: expected 0 with trace = "breaks", found '
            f"{options.stage3_module_granularity_threshold}; leave one of them out"
        )
    size = options.zero_hpz_partition_size
    if size < 1 or mesh.dp_shard % size:
        yield (
            f"strategy.zero_hpz_partition_size: expected a divisor of {mesh.dp_shard} ranks, found "
            f"{size}"
        )
    if mesh.dp_shard == 1:
        yield (
            "strategy.dp_shard: expected at least 2 ranks with deepspeed3, found 1, where "
            "DeepSpeed gathers by other paths"
        )


def quantized_groups(parameter: Parameter, num_ranks: int) -> int:
    """Groups of elements of a gradient that qgZ quantizes, each with a scale; 0 for one of one
    dimension, or that ranks do not divide."""
    if len(parameter.shape) == 1 or parameter.numel % (2 * num_ranks):
        return 0
    return max(*parameter.shape[:2], num_ranks)


def node_problems(
    options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision, per_node: int
) -> Iterator[str]:
    """Refusals of qgZ over nodes of `per_node` devices, one line each, the scenario's key first."""
    ranks = mesh.dp_shard
    if not options.zero_quantized_gradients or ranks <= per_node:
        return
    if ranks % per_node:
        yield (
            "strategy.zero_quantized_gradients: expected full nodes, found "
            f"{ranks} ranks on nodes of {per_node}"
        )
    if precision.reduce != HALF:
        yield (
            'precision.reduce: expected "fp16" with zero_quantized_gradients, whose kernels read '
            f'gradients of any dtype as fp16, found "{DTYPE_NAMES[precision.reduce]}"'
        )
    for parameter in model.parameters:
        groups = quantized_groups(parameter, ranks) if parameter.requires_grad else 0
        if groups and (groups % ranks or parameter.numel % (groups * ALIGNMENT)):
            yield (
                f"strategy.zero_quantized_gradients: expected dimensions of which the larger "
                f"divides by {ranks} ranks and the other by {ALIGNMENT}, found {parameter.fqn} of "
                f"{' × '.join(map(str, parameter.shape))}, where DeepSpeed fails; pad it"
            )
            return


def shard_model_problems(
    options: ShardOptions, model: ModelSpec, accumulates: bool = False,
    checkpointing: Checkpointing = NO_CHECKPOINTING,
) -> Iterator[str]:
    """Refusals of `model` at stage 3, one line each, the scenario's key first."""
    if isinstance(model, TracedModel):
        yield (
            "model: expected a preset or a family with deepspeed3, which gathers module by module, "
            "found one traced by units; deepspeed2, zero3 and fsdp2 take it"
        )
    yield from _scalars(model)
    if model.left_out:
        yield f"model.unused: expected none with deepspeed3, found {model.left_out[0].fqn}"
    if checkpointing.mode == "selective" or not checkpointing.early_stop:
        key, value = ("mode", "selective") if checkpointing.early_stop else ("early_stop", "false")
        yield (
            f"activation_checkpointing.{key}: expected another with deepspeed3, found {value}; "
            "modules that are recomputed in part, or beyond need, are not modelled"
        )
    if repeats(model):
        yield "model.uses: expected 1 with deepspeed3, whose trace would have each run"
    fine = _granular(options, model)
    if fine and fine != blocks(model):
        first_of = sorted(fine - blocks(model)) or sorted(blocks(model) - fine)
        verb = "takes" if first_of[0] in fine else "leaves out"
        yield (
            "strategy.stage3_module_granularity_threshold: expected one that takes each block or "
            f"none, found {options.stage3_module_granularity_threshold}, which {verb} "
            f'{first_of[0]}; leaf_module = "blocks" takes each'
        )
    if options.trace == "breaks" and (checkpointing.every > 1 or not _are_alike(model)):
        yield (
            'strategy.trace: expected "holds", found "breaks" without blocks that are alike, in '
            "parameters and in recomputation, and could change places"
        )
    leaves = leaf_blocks(options, model)
    if leaves and options.zero_hpz_partition_size > 1:
        yield (
            "strategy.zero_hpz_partition_size: expected 1 with leaf modules, found "
            f"{options.zero_hpz_partition_size}: DeepSpeed makes their copies in the order of a "
            "set; leave one of them out"
        )
    trained = {parameter.fqn for parameter in model.parameters if parameter.requires_grad}
    first = next((m for m in model.modules if trained.intersection(used_parameters(m))), None)
    if leaves and first is not None and is_leaf(first):
        yield (
            f"strategy.leaf_module: expected none, as the input of {first.path} needs no "
            "gradient, found blocks: DeepSpeed then reduces gradients of zeros"
        )
