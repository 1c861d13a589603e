"""What a scenario's tables make: each by itself, then the model, the cluster and the mesh on it.

Whatever is wrong is told, of all tables: one that cannot be made only hides what `combinations`
asks of it together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError, ZsimError
from zsim.io.units import parse_time
from zsim.ir.mesh import AXES, Mesh
from zsim.models import wrapping
from zsim.models.checkpointing import Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Dtype, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario import cross_checks
from zsim.scenario import frozen as training_part
from zsim.scenario.cluster_table import made_cluster
from zsim.scenario.expect import Expectation, expectation
from zsim.scenario.model_table import made_model
from zsim.scenario.schema import (
    BatchTable,
    CheckpointingTable,
    ExecutionTable,
    OptimizerTable,
    PrecisionTable,
    WrappingTable,
)
from zsim.strategies import STRATEGIES, wrapped

DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What the tables of a scenario make."""

    model: ModelSpec
    batch: Batch
    cluster: ClusterSpec
    mesh: Mesh
    options: Any
    precision: Precision
    optimizer: Optimizer
    checkpointing: Checkpointing
    wrapping: Wrapping
    execution: Execution
    expect: tuple[Expectation, ...]


def assembled(
    tables: Mapping[str, Any], strategy: Any, *, folder: Path | None, problems: list[str]
) -> Assembled | None:
    """What `tables` and the `strategy` table make, None where one is missing or wrong; `problems`
    learns all that is wrong.

    `tables` by their keys, each held to its schema, None for one that is wrong; files are looked
    for in `folder`.
    """

    def attempt(make: Callable[..., Made], *arguments: Any) -> Made | None:
        if any(argument is None for argument in arguments):
            return None
        try:
            return make(*arguments)
        except ScenarioError as error:
            problems.extend(error.problems)
        return None

    batch = attempt(_batch, tables["batch"])
    precision = attempt(_precision, tables["precision"])
    optimizer = attempt(_optimizer, tables["optimizer"])
    again = attempt(_checkpointing, tables["activation_checkpointing"])
    units = attempt(_wrapping, tables["wrapping"])
    execution = attempt(_execution, tables["execution"])

    model = attempt(lambda table, batch: made_model(table, batch, folder), tables["model"], batch)
    model = attempt(lambda model, units: _wrapped(model, units, strategy), model, units)
    model = attempt(
        lambda model, table, frozen: _trained_part(model, frozen, table.unused), model,
        tables["model"], tables["frozen"],
    )
    cluster = attempt(lambda table: made_cluster(table, folder), tables["cluster"])
    mesh = attempt(_mesh, strategy, None if cluster is None else cluster.num_ranks)
    options = attempt(_options, strategy)
    expect = [attempt(expectation, key, value) for key, value in (tables["expect"] or {}).items()]

    attempt(cross_checks.check_strategy, strategy, options, mesh, optimizer)
    attempt(cross_checks.check_checkpointing, model, again, batch, precision, strategy)
    attempt(cross_checks.check_precision, precision)
    attempt(cross_checks.check_execution, execution, cluster, model)
    attempt(cross_checks.check_transformers, model, tables["model"], batch, precision, again, units)
    attempt(cross_checks.check_traced, model, batch, precision, again, strategy)
    attempt(cross_checks.check_model, model, options, batch, precision, strategy, again)
    attempt(cross_checks.check_work, model, strategy, options, mesh, batch)
    if not problems:
        attempt(cross_checks.check_kernels, model, precision, cluster)
    if model is None or cluster is None or mesh is None or options is None or batch is None:
        return None
    if (
        precision is None
        or optimizer is None
        or again is None
        or units is None
        or execution is None
    ):
        return None
    return Assembled(
        model=model,
        batch=batch,
        cluster=cluster,
        mesh=mesh,
        options=options,
        precision=precision,
        optimizer=optimizer,
        checkpointing=again,
        wrapping=units,
        execution=execution,
        expect=tuple(item for item in expect if item is not None),
    )


def _batch(table: BatchTable) -> Batch:
    return Batch(**table.model_dump())


def _precision(table: PrecisionTable) -> Precision:
    autocast: Dtype | Literal["none"] = (
        "none" if table.autocast == "none" else DTYPES[table.autocast]
    )
    return Precision(
        parameters=DTYPES[table.parameters], reduce=DTYPES[table.reduce], autocast=autocast
    )


def _optimizer(table: OptimizerTable) -> Optimizer:
    return Optimizer(**table.model_dump())


def _checkpointing(table: CheckpointingTable) -> Checkpointing:
    return Checkpointing(**table.model_dump())


def _wrapping(table: WrappingTable) -> Wrapping:
    return Wrapping(**table.model_dump())


def _execution(table: ExecutionTable) -> Execution:
    return Execution(
        compile=table.compile,
        float8=table.float8,
        float8_casts=table.float8_casts,
        attention_kernels=table.attention_kernels,
        norms=table.norms,
        loss=table.loss,
        accumulation=table.accumulation,
        softmax=table.softmax,
        products=table.products,
        interference=table.interference,
        step_overhead_ns=parse_time(table.step_overhead),
        micro_batch_overhead_ns=parse_time(table.micro_batch_overhead),
        issue_kernel_ns=None if table.issue_kernel is None else parse_time(table.issue_kernel),
    )


def _wrapped(model: ModelSpec, asked: Wrapping, strategy: Any) -> ModelSpec:
    cross_checks.refuse(wrapping.problems(asked, model))
    return (
        wrapping.wrapped(model, asked) if strategy is None else wrapped(strategy.name, model, asked)
    )


def _trained_part(model: ModelSpec, frozen: tuple[str, ...], unused: tuple[str, ...]) -> ModelSpec:
    """`model` with what is frozen or unused."""
    return training_part.cut(model, frozen=frozen, unused=unused)


def _options(strategy: Any) -> Any:
    kind = STRATEGIES[strategy.name].options
    try:
        return kind(**{field.name: getattr(strategy, field.name) for field in fields(kind)})
    except (ValueError, ZsimError) as error:
        raise ScenarioError((f"strategy: {error}",)) from None


def _mesh(strategy: Any, num_ranks: int) -> Mesh:
    """The mesh on the cluster's ranks; one axis that is not given is filled, more than one must be
    given."""
    axes = STRATEGIES[strategy.name].axes
    sizes = {axis: getattr(strategy, axis) for axis in axes}
    open_axes = [axis for axis, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        found = f"found nothing ({', '.join(axes)} make the mesh)"
        raise ScenarioError((f"strategy.{open_axes[0]}: expected a size, {found}",))
    given = prod(size for size in sizes.values() if size)
    if open_axes:
        if num_ranks % given:
            raise ScenarioError((f"strategy.{axes[0]}: {given} does not divide the cluster's "
                                 f"{num_ranks} ranks",))
        sizes[open_axes[0]] = num_ranks // given
    elif given != num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ScenarioError((f"strategy.{axes[0]}: {product} = {given} ranks, but the cluster has "
                             f"{num_ranks}",))
    assert set(sizes) <= set(AXES)
    return Mesh(**sizes)
