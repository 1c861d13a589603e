"""Strategy: an entry of the table of strategies, with all that others may ask of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from zsim.autograd.lowered import UnitHooks
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.saving import CheckpointFormat
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.models.training_options import Library, Precision


class Formula(NamedTuple):
    """The formula of the literature that counts a strategy's states, and the optimizer's copy."""

    stage: Literal["ddp", "zero1", "zero2", "zero3"]
    keeps: Literal["master copy", "no master copy", "float32 shards"] = "master copy"

    @property
    def number(self) -> int:
        """The stage as DeepSpeed counts it, 0 where nothing is sharded."""
        return 0 if self.stage == "ddp" else int(self.stage[-1])


class OptionValue(NamedTuple):
    """A `value` of an option that saves memory or time, and its `effect` for reports."""

    option: str
    value: bool | int | str
    effect: str = ""

    def is_set(self, options: Any) -> bool:
        """True where `options` have this value already."""
        present = getattr(options, self.option)
        return type(present) is type(self.value) and bool(present == self.value)

    def set_in(self, options: Any) -> Any:
        """`options` with this value."""
        return replace(options, **{self.option: self.value})


def _none(*_: Any, **__: Any) -> Iterator[str]:
    return iter(())


def _same_model(model: ModelSpec) -> ModelSpec:
    return model


def _all_alike(model: ModelSpec, mesh: Mesh) -> int:
    return 1


def _unit_groups(options: Any, model: ModelSpec) -> int:
    return len(model.units)


def _never(options: Any) -> bool:
    return False


def _no_leaves(options: Any, model: ModelSpec) -> bool:
    return False


def _no_elements(options: Any, model: ModelSpec) -> int:
    return 0


def _each_by_itself(options: Any, numels: Sequence[int], num_shards: int) -> Sequence[int]:
    return range(len(numels))


def _no_lines(*arguments: object) -> tuple[str, ...]:
    return ()


def _nothing_pinned(*arguments: object) -> int:
    return 0


class DriveFiles(NamedTuple):
    """Files of a tensor that the optimizer steps: its part of their names, and the bytes of its
    parameters' own ones, if any."""

    name: str
    parameters_nbytes: int


def _no_files(*arguments: object) -> Mapping[int, DriveFiles]:
    return {}


def _no_buffers(options: Any, model: ModelSpec, dtype: str) -> tuple[tuple[ParamGroup, bool], ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """`plan(training, mesh=…, options=…)`, the class of its options, and the mesh axes it uses,
    outermost first: the last one shards. A strategy of one rank alone has none.

    Each strategy's file ends with its own entry. Code outside this package asks for these facts,
    and not for a name; a law or a page may compare strategies that it names.
    """

    plan: Callable[..., Program]
    options: type[Any]
    axes: tuple[str, ...]
    formula: Formula
    library: Library
    """The code that trains by it in a real run."""
    problems: Callable[..., Iterator[str]] = _none
    """`problems(options, mesh, optimizer)`: refusals, one line each, the scenario's key first."""
    model_problems: Callable[..., Iterator[str]] = _none
    """`model_problems(options, model, accumulates, checkpointing)`: refusals of a model, as above;
    `accumulates`: gradients wait for a later micro-batch in another dtype than the reduction's."""

    precision_problems: Callable[[Precision], Iterator[str]] = _none
    """`precision_problems(precision)`: refusals of dtypes, as above."""
    node_problems: Callable[..., Iterator[str]] = _none
    """`node_problems(options, model, mesh, precision, per_node)`: refusals on nodes of so many
    devices, as above."""
    syncs: tuple[Literal["every", "last"], ...] = ("every", "last")
    """The micro-batches after which gradients may be reduced, the default first; none where nothing
    is reduced."""
    sums_losses: bool = True
    """Several forwards may come before a backward of their summed losses."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Keys of the strategy's library that are none of its options, and where a scenario has them,
    or why it has none."""

    # -- the model under the strategy

    casts_input: bool = False
    """The model's floating-point inputs are cast to 2-byte parameters' dtype, as fully_shard
    does."""
    steps_two_bytes: bool = True
    """The optimizer may step two-byte parameters, of which there are no float32 ones."""
    masters_of_cast: bool = False
    """Float32 master copies are made of parameters that have been cast to two bytes."""
    nests: Literal["units", "buffers", "modules", "nothing"] = "nothing"
    """Units inside blocks: modules with hooks of their own, flat buffers of their own, every module
    that owns parameters, or no units at all."""
    leaf_blocks: Callable[[Any, ModelSpec], bool] = _no_leaves
    """`leaf_blocks(options, model)`: True where every module has hooks, but those inside blocks."""
    differentiates: Callable[[ModelSpec], ModelSpec] = _same_model
    """The model as autograd sees it, in which modules may read other parameters than its own."""
    unit_hooks: UnitHooks = "raw_inputs"
    """Effects of its hooks on autograd; a traced model has a recording of each."""

    # -- work

    hooks: float = 0.0
    """Host's time of the Python hooks of modules that issue collectives, over that of FSDP's hooks
    (`Overheads.issue_hook`); 0 for none. On a CPU they wait for each collective."""
    dtensors: bool = False
    """The optimizer steps DTensors, each of which takes the host a dispatch of its own."""
    num_distinct_ranks: Callable[[ModelSpec, Mesh], int] = _all_alike
    """Upper bound of the number of different rank programs of a model on a mesh."""
    num_groups: Callable[[Any, ModelSpec], int] = _unit_groups
    """`num_groups(options, model)`: param groups that are gathered or reduced as one."""
    offloadable: tuple[Literal["optimizer", "parameters"], ...] = ()
    """The states that it can offload by the scenario's table `offload`."""
    offloads_shards_alone: bool = False
    """Shards of parameters may be in host memory while the device steps."""
    pinned: Callable[..., int] = _nothing_pinned
    """`pinned(offload, options, model, mesh, precision)`: bytes of a rank's pinned host memory."""
    on_drives: tuple[Literal["optimizer", "parameters"], ...] = ()
    """The ones among them that it can keep on NVMe drives."""
    drive_nbytes: Callable[..., int] = _nothing_pinned
    """`drive_nbytes(offload, options, model, mesh, precision, optimizer)`: bytes of a rank there.
    """
    drive_problems: Callable[..., Iterable[str]] = _no_lines
    """`drive_problems(offload, options, model, mesh, precision, optimizer)`: refusals of states
    there."""
    drive_caveats: Callable[..., Iterable[str]] = _no_lines
    """`drive_caveats(offload, options, model, mesh, precision)`: what its user may not expect of
    drives, or of the engine's options."""
    memory_caveats: Callable[..., Iterable[str]] = _no_lines
    """`memory_caveats(options, model, precision)`: what may be reserved on GPUs and is not told."""
    offload_option: str = ""
    """Name of an option that moves all sharded states to the host, "" for none."""
    offloads: Callable[[Any], bool] = _never
    """Sharded parameters, gradients and optimizer states lie in host memory with these options."""

    wraps_optimizer: bool = False
    """True where an optimizer of the library's own wraps the scenario's."""

    # -- other tools

    configs: tuple[Literal["accelerate", "deepspeed", "fully_shard", "torchtitan"], ...] = ()
    """Configs that `zsim export` writes of its scenarios."""

    # -- checkpoints

    saves: Literal["parameters", "buffers", "engine", ""] = ""
    """Tensors of its checkpoints: one for each parameter, or for each flat buffer, or those of
    DeepSpeed's engine alone; "" where its state dicts are not modelled."""
    reorders: Callable[[Any], bool] = _never
    """`reorders(options)`: its flat buffer has parameters in another order than the model."""
    stepped: Callable[[Any, Sequence[int], int], Sequence[int]] = _each_by_itself
    """`stepped(options, numels, num_shards)`: the first parameter of each tensor that the optimizer
    steps, of parameters with so many elements."""
    files_on_drives: Callable[..., Mapping[int, DriveFiles]] = _no_files
    """`files_on_drives(offload, options, model, mesh, precision)`: files of such tensors, by their
    numbers."""
    flat_buffers: Callable[[Any, ModelSpec, str], tuple[tuple[ParamGroup, bool], ...]] = _no_buffers
    """`flat_buffers(options, model, dtype)`: flat buffers whose shards ranks hold, and whether each
    is trained."""

    num_whole: Callable[[Any, ModelSpec], int] = _no_elements
    """`num_whole(options, model)`: elements of parameters that stay whole, though the formula's
    stage shards parameters."""

    # -- alternatives

    shards_more: str = ""
    """The strategy that shards one state more: the next stage of ZeRO."""
    over_all_ranks: str = ""
    """The strategy that shards over all ranks, if this one can keep replicas; itself if it does
    both."""
    on_several_ranks: str = ""
    """The strategy that trains so on several ranks, if this one is of one rank alone."""
    offloaded_by: str = ""
    """The strategy whose own option keeps all states in host memory, if this one cannot."""
    saves_memory: tuple[OptionValue, ...] = ()
    """Options that trade time for memory."""
    keeps_gathered: tuple[OptionValue, ...] = ()
    """Options to try with which units stay gathered from forward to backward."""
    frees_after_forward: tuple[OptionValue, ...] = ()
    """Options that free all blocks in between, the one that frees most first."""
    asks_replicas: bool = False
    """A scenario has to say how many replicas there are."""
    for_left_out: tuple[OptionValue, ...] = ()
    """Options that it needs for a model with parts that forward leaves out."""
    gathers_earlier: tuple[OptionValue, ...] = ()
    """Options that issue all-gathers earlier."""
    prefetch_depths: tuple[str, ...] = ()
    """Options that count the modules, or units, gathered ahead."""
    bucket_cap: str = ""
    """The option with the size of a gradient bucket, in MiB."""

    def casts(self, precision: Precision) -> bool:
        """True where units cast what they gather, and inputs: parameters are kept in another
        dtype."""
        return self.casts_input and precision.stepped != precision.parameters

    @property
    def shard_axis(self) -> str:
        """The axis that shards, or the group of all ranks where there is none."""
        return self.axes[-1] if self.axes else "world"

    @property
    def is_own(self) -> bool:
        """True where neither torch nor DeepSpeed has it, and the executor carries it out.

        It adds gradients into buffers of its own, which may be float32 (`execution.accumulation`).
        On a CPU the host waits for each of its collectives.
        """
        return self.library == "zsim"

    @property
    def torchrun(self) -> bool:
        """True where torchrun starts its ranks. DeepSpeed has a launcher of its own."""
        return self.library != "deepspeed"

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        """The format of checkpoints where a scenario names none."""
        return "deepspeed" if self.saves == "engine" else "sharded"

    @property
    def leaves(self) -> bool:
        """True where modules read leaves of autograd, whose casts autocast caches."""
        return self.unit_hooks != "fsdp1_views"
