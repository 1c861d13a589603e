"""The strategies by name: each a pure function from a Training, a mesh and its options to a
Program.

To add one, add a file and a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from zsim.autograd.lowered import UnitHooks
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models import wrapping
from zsim.models.checkpointing import Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.wrapping import Wrapping
from zsim.strategies import ddp, fsdp1, fsdp2, hsdp, zero1, zero2, zero3, zero_redundancy
from zsim.strategies.flat_parameter import views


@dataclass(frozen=True, slots=True)
class Formula:
    """Which formula of the literature counts its states, and what the optimizer steps."""

    stage: Literal["ddp", "zero1", "zero2", "zero3"]
    keeps: Literal["master copy", "no master copy", "float32 shards"] = "master copy"


def _none(*_: Any) -> Iterator[str]:
    return iter(())


def _itself(model: ModelSpec) -> ModelSpec:
    return model


def _one_kind(model: ModelSpec, mesh: Mesh) -> int:
    return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """`plan(training, mesh=…, options=…)`, the class of its options, and the mesh axes it uses,
    outermost first.

    `casts_input`: with 2-byte parameters it casts floating-point inputs of the model itself, as
    fully_shard does. `hooks`: those of modules, in Python, issue its collectives, as FSDP's do;
    that takes the host time, and on a CPU they wait for each where they call it.
    """

    plan: Callable[..., Program]
    options: type[Any]
    axes: tuple[str, ...]
    formula: Formula
    casts_input: bool = False
    hooks: bool = False
    kinds: Callable[[ModelSpec, Mesh], int] = _one_kind
    """The most kinds of ranks, whose programs differ, that a model has on a mesh."""
    nests: Literal["units", "kept units", "buffers", "nothing"] = "nothing"
    """What units in blocks are to it: units whose modules have hooks of their own, but for "kept
    units" not in a block that is recomputed whole; flat buffers apart; nothing where it has no
    units."""
    differentiates: Callable[[ModelSpec], ModelSpec] = _itself
    """The model as autograd sees it, in which modules may read other parameters than its own."""
    unit_hooks: UnitHooks = "raw_inputs"
    """Effects of its hooks on autograd; a traced model has a recording of each."""
    problems: Callable[..., Iterator[str]] = _none
    """`problems(options, mesh, optimizer)`: what it cannot do of what a scenario asks, one line
    each, with the key in front."""
    model_problems: Callable[..., Iterator[str]] = _none
    """`model_problems(options, model, accumulates)`: what it cannot do with a model; whether
    gradients wait in the reduce dtype."""

    @property
    def leaves(self) -> bool:
        """Whether what modules read are leaves of autograd, whose casts autocast caches."""
        return self.unit_hooks != "fsdp1_views"


def model_problems(
    name: str, options: Any, model: ModelSpec, *, casts: bool, waits: bool
) -> tuple[str, ...]:
    """What the strategy `name` with its `options` cannot do with `model`, one line each.

    `casts`: gradients are reduced in another dtype than theirs; `waits`: some micro-batches leave
    them for a later one to reduce.
    """
    return tuple(STRATEGIES[name].model_problems(options, model, casts and waits))


def recomputed_problems(name: str, model: ModelSpec, asked: Checkpointing) -> Iterator[str]:
    """What the strategy `name` cannot do with `model` recomputed as `asked`, one line each."""
    if (
        model.nested
        and STRATEGIES[name].nests == "kept units"
        and asked.mode != "none"
        and not asked.recompute
    ):
        yield (
            f"activation_checkpointing: expected no units in a block that {name} recomputes, "
            f"found wrapping.nested; use `recompute`, "
            "or leave one of them out"
        )


def wrapped(name: str, model: ModelSpec, asked: Wrapping) -> ModelSpec:
    """`model` with the units that `asked` makes under the strategy `name`: without those in blocks
    where they are nothing to it."""
    nests = STRATEGIES[name].nests
    if nests == "nothing":
        asked = replace(asked, nested=())
    return wrapping.wrapped(model, asked, in_parts=nests != "buffers")


STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy(
        plan=ddp.plan,
        options=ddp.Options,
        axes=("dp_replicate",),
        formula=Formula("ddp"),
        nests="nothing",
        model_problems=ddp.model_problems,
    ),
    "zero1": Strategy(
        plan=zero1.plan,
        options=zero1.Options,
        axes=("dp_shard",),
        formula=Formula("zero1"),
        nests="buffers",
    ),
    "zero2": Strategy(
        plan=zero2.plan,
        options=zero2.Options,
        axes=("dp_shard",),
        formula=Formula("zero2"),
        nests="buffers",
    ),
    "zero3": Strategy(
        plan=zero3.plan,
        options=zero3.Options,
        axes=("dp_shard",),
        formula=Formula("zero3"),
        nests="buffers",
        problems=zero3.problems,
    ),
    "fsdp2": Strategy(
        plan=fsdp2.plan,
        options=fsdp2.Options,
        axes=("dp_shard",),
        formula=Formula("zero3", keeps="float32 shards"),
        casts_input=True,
        hooks=True,
        kinds=fsdp2.kinds,
        nests="units",
        unit_hooks="fully_shard",
        problems=fsdp2.problems,
        model_problems=fsdp2.model_problems,
    ),
    "hsdp": Strategy(
        plan=hsdp.plan,
        options=hsdp.Options,
        axes=("dp_replicate", "dp_shard"),
        formula=Formula("zero3", keeps="float32 shards"),
        casts_input=True,
        hooks=True,
        kinds=fsdp2.kinds,
        nests="units",
        unit_hooks="fully_shard",
        problems=fsdp2.problems,
        model_problems=fsdp2.model_problems,
    ),
    "fsdp1": Strategy(
        plan=fsdp1.plan,
        options=fsdp1.Options,
        axes=("dp_replicate", "dp_shard"),
        formula=Formula("zero3", keeps="float32 shards"),
        casts_input=True,
        hooks=True,
        kinds=fsdp1.kinds,
        nests="kept units",
        differentiates=views.viewed,
        unit_hooks="fsdp1_views",
        problems=fsdp1.problems,
        model_problems=fsdp1.model_problems,
    ),
    "zero_redundancy": Strategy(
        plan=zero_redundancy.plan,
        options=zero_redundancy.Options,
        axes=("dp_replicate",),
        formula=Formula("zero1", keeps="no master copy"),
        nests="nothing",
        kinds=zero_redundancy.kinds,
        model_problems=ddp.model_problems,
    ),
}
