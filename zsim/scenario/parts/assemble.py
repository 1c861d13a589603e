"""Parts of a scenario from its tables: each by itself, then the model, the cluster and the mesh.

Every problem of every table is reported: a part that cannot be made only hides what `refusals`
says of it together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.execution import Execution
from zsim.engine.faults.fault import Fault
from zsim.errors import ScenarioError
from zsim.io.units import counted, parse_time
from zsim.ir.mesh import AXES, Mesh
from zsim.models import wrapping
from zsim.models.checkpointing import Checkpointing
from zsim.models.saving import Checkpoint
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NAMES, Batch, Offload, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario.checks import refusals
from zsim.scenario.checks.fault_checks import made_faults, with_links
from zsim.scenario.expect import Expectation, expectation
from zsim.scenario.keys.checkpoint_table import checkpoint_of
from zsim.scenario.parts import frozen
from zsim.scenario.parts.cluster_table import made_cluster
from zsim.scenario.parts.model_table import made_model, named
from zsim.strategies import STRATEGIES, wrapped

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
Made = TypeVar("Made")


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of a scenario, as Scenario has them; None for one that is missing or wrong."""

    strategy: str | None
    sync: Literal["every", "last"]
    batch: Batch | None
    precision: Precision | None
    optimizer: Optimizer | None
    offload: Offload | None
    checkpointing: Checkpointing | None
    wrapping: Wrapping | None
    execution: Execution | None
    checkpoint: Checkpoint | None
    faults: tuple[Fault, ...] | None = None
    expect: tuple[Expectation, ...] = ()
    model: ModelSpec | None = None
    cluster: ClusterSpec | None = None
    mesh: Mesh | None = None
    options: Any = None


def assemble(
    tables: Mapping[str, Any], strategy: Any, *, faults: Sequence[Any] | None,
    folder: Path | None, problems: list[str],
) -> Parts:
    """The parts that `tables` and those of the strategy and its `faults` make; all that is wrong
    goes to `problems`.

    `tables` are by their keys, each held to its schema, None for one that is wrong; files are
    looked for in `folder`.
    """
    attempt = partial(_attempt, problems)
    parts = Parts(
        strategy=None if strategy is None else strategy.name,
        sync=getattr(strategy, "sync", "every"),
        batch=attempt(partial(_same_fields, Batch), tables["batch"]),
        precision=attempt(_precision, tables["precision"]),
        optimizer=attempt(partial(_same_fields, Optimizer), tables["optimizer"]),
        offload=attempt(partial(_same_fields, Offload), tables["offload"]),
        checkpointing=attempt(
            partial(_same_fields, Checkpointing), tables["activation_checkpointing"]
        ),
        wrapping=attempt(partial(_same_fields, Wrapping), tables["wrapping"]),
        execution=attempt(_execution, tables["execution"]),
        checkpoint=attempt(checkpoint_of, tables["checkpoint"], strategy and strategy.name),
    )
    table = attempt(named, tables["model"])
    model = attempt(partial(made_model, folder=folder), table, parts.batch)
    parts.options = attempt(_options, strategy)
    model = attempt(
        partial(_wrapped, parts.strategy, options=parts.options), model, parts.wrapping
    )
    model = attempt(_trained_part, model, table, tables["frozen"])
    parts.model = attempt(Execution.form_of, parts.execution, model)
    parts.faults = attempt(made_faults, faults)
    parts.cluster = attempt(partial(made_cluster, folder=folder), tables["cluster"])
    parts.cluster = attempt(with_links, parts.cluster, parts.faults or ())
    parts.mesh = attempt(_mesh, strategy, parts.cluster)
    entries = [attempt(expectation, key, value) for key, value in (tables["expect"] or {}).items()]
    parts.expect = tuple(entry for entry in entries if entry is not None)
    problems += refusals.problems(parts)
    return parts


def _attempt(problems: list[str], make: Callable[..., Made], *arguments: Any) -> Made | None:
    """The part that `make` returns; None where an argument is None, or after adding its refusals to
    `problems`."""
    if any(argument is None for argument in arguments):
        return None
    try:
        return make(*arguments)
    except ScenarioError as error:
        problems.extend(error.problems)
    return None


def _same_fields(kind: Callable[..., Made], table: Any) -> Made:
    """A part whose table has its very fields as keys."""
    return kind(**dict(table))


def _precision(table: Any) -> Precision:
    named = table.model_dump()
    return Precision(**{key: DTYPES.get(value, value) for key, value in named.items()})


def _execution(table: Any) -> Execution:
    """The Execution of a table; keys of times have no unit in their names, and one in their values.
    """
    times = {field.name for field in fields(Execution) if field.name.endswith("_ns")}
    values: dict[str, Any] = {}
    for key, value in table.model_dump().items():
        if f"{key}_ns" in times:
            values[f"{key}_ns"] = None if value is None else parse_time(value)
        else:
            values[key] = value
    return Execution(**values)


def _wrapped(
    strategy: str | None, model: ModelSpec, policy: Wrapping, *, options: Any
) -> ModelSpec:
    """`model` with the units of `policy`; ScenarioError where it has no such units."""
    if problems := tuple(wrapping.problems(policy, model)):
        raise ScenarioError(problems)
    if strategy is None:
        return wrapping.wrapped(model, policy)
    return wrapped(strategy, model, policy, options)


def _trained_part(model: ModelSpec, table: Any, patterns: tuple[str, ...]) -> ModelSpec:
    """`model` with what is frozen or unused."""
    return frozen.cut(model, frozen=patterns, unused=table.unused)


def _options(strategy: Any) -> Any:
    kind = STRATEGIES[strategy.name].options
    return kind(**{field.name: getattr(strategy, field.name) for field in fields(kind)})


def _mesh(strategy: Any, cluster: ClusterSpec) -> Mesh:
    """The mesh on the cluster's ranks. One axis without a size is filled; of several, all but one
    need a size. Without any, a strategy that may shard over all ranks does so."""
    kind = STRATEGIES[strategy.name]
    axes = kind.axes
    sizes = {axis: getattr(strategy, axis) for axis in axes}
    if not axes:  # a strategy of one rank refuses others in its own words
        return Mesh(dp_replicate=cluster.num_ranks)
    if kind.over_all_ranks == strategy.name and not any(sizes.values()):
        sizes["dp_replicate"] = 1
    open_axes = [axis for axis, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        lack = f"found nothing ({', '.join(axes)} make the mesh)"
        raise ScenarioError((f"strategy.{open_axes[0]}: expected a size, {lack}",))
    sized = prod(size for size in sizes.values() if size)
    if open_axes:
        if cluster.num_ranks % sized:
            key = next(axis for axis, size in sizes.items() if size)
            raise ScenarioError((f"strategy.{key}: expected a divisor of the cluster's "
                                 f"{counted(cluster.num_ranks, 'rank')}, found {sized}; take "
                                 f"another size, or a cluster of a multiple of {sized} ranks",))
        sizes[open_axes[0]] = cluster.num_ranks // sized
    elif sized != cluster.num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        ranks = counted(cluster.num_ranks, "rank")
        raise ScenarioError((f"cluster: expected {sized:,}, by strategy.{product}, found {ranks}; "
                             f"leave one axis out of the strategy to fill the cluster",))
    assert set(sizes) <= set(AXES)
    return Mesh(**sizes)
