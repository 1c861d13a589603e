"""Scenario files: TOML text to a whole, frozen Scenario; every problem listed with file and key.

`schema` has checked each key by itself; here the model, the cluster and the mesh are made and checked together.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from zsim import checkpointing, compute, guards, training_part, transformers_problems, wrapping
from zsim.checkpointing import Checkpointing
from zsim.cluster_table import made_cluster
from zsim.eager_sdpa import kernel_problem
from zsim.errors import ScenarioError, ZsimError
from zsim.execution import Execution
from zsim.expect import Expectation, expectation
from zsim.hardware import ClusterSpec
from zsim.mesh import AXES, Mesh
from zsim.model import ModelSpec
from zsim.model_table import made_model
from zsim.schema import (
    BatchTable,
    CheckpointingTable,
    ExecutionTable,
    ModelTable,
    OptimizerTable,
    PrecisionTable,
    WrappingTable,
)
from zsim.strategies import STRATEGIES, model_problems, recomputed_problems, wrapped
from zsim.table_checks import each_key_once, parts, strategy_of
from zsim.traced import FAMILY, TracedModel
from zsim.training import Batch, Dtype, Optimizer, Precision
from zsim.units import parse_time
from zsim.work import Work, work
from zsim.wrapping import Wrapping

DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OUTSIDE_THE_TRAINING = ("description", "cluster", "allocator", "execution", "expect")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole scenario, checked. `text` is what it was read from, so that ranks of a real run read the same."""

    name: str
    description: str
    model: ModelSpec
    batch: Batch
    cluster: ClusterSpec
    mesh: Mesh
    strategy: str
    options: Any
    sync: Literal["every", "last"]
    precision: Precision
    optimizer: Optimizer
    checkpointing: Checkpointing
    wrapping: Wrapping
    execution: Execution
    expandable_segments: bool
    """Whether torch's caching allocator grows segments page by page instead of taking fixed ones (PYTORCH_CUDA_ALLOC_CONF)."""
    steps: int
    seed: int
    expect: tuple[Expectation, ...]
    text: str
    folder: str

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that depend on what is trained and how, as the file says it, and not on where or what is expected."""
        table = {key: value for key, value in tomllib.loads(self.text).items() if key not in OUTSIDE_THE_TRAINING}
        said = json.dumps([table, self.mesh.shape], sort_keys=True, default=str)
        if {"huggingface", "traced"} & set(table.get("model", {})):
            said += repr(self.model)  # the text names only the file that says it
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this one names: a config.json, a traced model, a cluster's."""
        table = tomllib.loads(self.text)
        named = [table["model"].get(key) for key in ("huggingface", "traced")] + [table["cluster"].get("file")]
        return tuple(Path(self.folder) / name for name in named if name)

    @property
    def executed(self) -> Execution:
        """`execution` by this strategy on this cluster: FSDP's hooks take the host time, and on a CPU do one thing after another."""
        hooks = STRATEGIES[self.strategy].hooks
        return replace(self.execution, hooks=hooks, synchronous=hooks and self.cluster.kind == "cpu")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.world_size

    @property
    def work(self) -> Work:
        """How much work it is to simulate."""
        return work(self.model, strategy=self.strategy, options=self.options, mesh=self.mesh, batch=self.batch)


def load(path: str | Path) -> Scenario:
    """The scenario in a file; ScenarioError listing every problem, each with file and key."""
    file = Path(path)
    try:
        if not file.is_file():
            raise ScenarioError((f"{file}: no such file, or not a plain one; `zsim list scenarios` shows those there are",))
        with file.open("rb") as stream:
            data = stream.read(guards.MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((f"{file}: cannot be read: {error.strerror}",)) from None
    return parse(data, where=str(file), folder=file.parent)


def parse(data: bytes, *, where: str, folder: Path | None = None) -> Scenario:
    """The scenario in `data`; `where` names it in messages, `folder` is where a config.json is looked for."""
    text = guards.check_text(data, where=where)
    try:
        table = tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ScenarioError((f"{where}: not TOML: {str(error)[:200]}",)) from None
    problems = list(guards.number_problems(table))
    tables = parts(table, problems)
    strategy = strategy_of(table.get("strategy"), problems)
    made = _Made.of(tables, strategy, folder=folder, problems=problems)
    if problems or made is None:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in each_key_once(problems)))
    precision: PrecisionTable = tables["precision"]
    missing = kernel_problem(made.model, _precision(precision), device=made.cluster.kind)
    if missing:
        raise ScenarioError((f"{where}: {missing}",))
    return Scenario(
        name=Path(where).stem,
        description=tables["description"],
        model=made.model,
        batch=Batch(**tables["batch"].model_dump()),
        cluster=made.cluster,
        mesh=made.mesh,
        strategy=strategy.name,
        options=made.options,
        sync=strategy.sync,
        precision=_precision(precision),
        optimizer=Optimizer(**tables["optimizer"].model_dump()),
        checkpointing=Checkpointing(**tables["activation_checkpointing"].model_dump()),
        wrapping=Wrapping(**tables["wrapping"].model_dump()),
        execution=_execution(tables["execution"]),
        expandable_segments=tables["allocator"].expandable_segments,
        steps=tables["steps"],
        seed=tables["seed"],
        expect=made.expect,
        text=text,
        folder=str(folder or "."),
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """What tables make together: the model, the cluster, the mesh on it, the strategy's options, and expectations."""

    model: ModelSpec
    cluster: ClusterSpec
    mesh: Mesh
    options: Any
    expect: tuple[Expectation, ...]

    @classmethod
    def of(cls, tables: dict[str, Any], strategy: Any, *, folder: Path | None, problems: list[str]) -> _Made | None:
        """What can be made of the tables that are right; `problems` learns what cannot. None when something is missing."""

        def attempt(make: Callable[..., Made], *arguments: Any) -> Made | None:
            if any(argument is None for argument in arguments):
                return None
            try:
                return make(*arguments)
            except ScenarioError as error:
                problems.extend(error.problems)
            return None

        model = attempt(lambda table, batch: made_model(table, batch, folder), tables["model"], tables["batch"])
        model = attempt(lambda model, table: _wrapped(model, table, strategy), model, tables["wrapping"])
        model = attempt(_trained_part, model, tables["model"], tables["frozen"])
        cluster = attempt(lambda table: made_cluster(table, folder), tables["cluster"])
        mesh = attempt(_mesh, strategy, None if cluster is None else cluster.num_ranks)
        options = attempt(_options, strategy)
        expect = [attempt(expectation, key, value) for key, value in (tables["expect"] or {}).items()]
        attempt(_check_together, strategy, options, mesh, tables["optimizer"])
        attempt(_check_checkpointing, model, *(tables[key] for key in ("activation_checkpointing", "batch", "precision")), strategy)
        attempt(_check_precision, tables["precision"])
        attempt(_check_execution, tables["execution"], cluster, model)
        asked = ("model", "batch", "precision", "activation_checkpointing", "wrapping")
        attempt(_check_transformers, model, *(tables[key] for key in asked))
        attempt(_check_traced, model, tables["batch"], tables["precision"], tables["activation_checkpointing"], strategy)
        attempt(_check_model, model, options, tables["batch"], tables["precision"], strategy, tables["activation_checkpointing"])
        attempt(_check_work, model, strategy, options, mesh, tables["batch"])
        if model is None or cluster is None or mesh is None or options is None:
            return None
        return cls(model, cluster, mesh, options, tuple(item for item in expect if item is not None))


def _check_together(strategy: Any, options: Any, mesh: Mesh, optimizer: OptimizerTable) -> None:
    """What the strategy refuses of its options on this mesh and with this optimizer."""
    problems = tuple(STRATEGIES[strategy.name].problems(options, mesh, Optimizer(**optimizer.model_dump())))
    if optimizer.name == "adamw" and optimizer.momentum:
        problems += ("optimizer.momentum: expected only with sgd, found with adamw, whose betas are torch's defaults",)
    if problems:
        raise ScenarioError(problems)


def _precision(table: PrecisionTable) -> Precision:
    autocast: Dtype | Literal["none"] = "none" if table.autocast == "none" else DTYPES[table.autocast]
    return Precision(parameters=DTYPES[table.parameters], reduce=DTYPES[table.reduce], autocast=autocast)


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


def _has_explicit_attention(model: ModelSpec) -> bool:
    return any(op.kind == "attention" and op.implementation == "explicit" for module in model.modules for op in module.operators)


def _check_execution(table: ExecutionTable, cluster: ClusterSpec, model: ModelSpec) -> None:
    problems = list(compute.problems(_execution(table), cluster.device))
    if model.family == FAMILY:
        asked = [key for key in ("norms", "loss") if getattr(table, key) != "fused"]
        problems += [f"execution.{key}: expected fused, for a trace has the calls that its module makes" for key in asked]
        if table.softmax != "eager":
            problems.append("execution.softmax: expected eager, for a trace has the calls that its module makes")
    elif table.softmax != "eager" and not _has_explicit_attention(model):
        expected = 'expected eager, for only explicit attention has a softmax of its own; set model.attention = "explicit"'
        problems.append(f"execution.softmax: {expected}")
    if problems:
        raise ScenarioError(tuple(problems))


def _check_precision(table: PrecisionTable) -> None:
    """Autocast casts float32 weights: it leaves those that have two bytes already as they are."""
    if table.autocast != "none" and table.parameters != "fp32":
        expected = 'expected only with parameters = "fp32", of which it makes two-byte copies'
        raise ScenarioError((f'precision.autocast: {expected}, found with "{table.parameters}"',))


def _check_checkpointing(
    model: ModelSpec, table: CheckpointingTable, batch: BatchTable, precision: PrecisionTable, strategy: Any
) -> None:
    asked, casts = Checkpointing(**table.model_dump()), precision.autocast != "none" and STRATEGIES[strategy.name].leaves
    problems = tuple(checkpointing.problems(asked, model, casts=casts, forwards=batch.forwards))
    if problems:
        raise ScenarioError(problems)


def _wrapped(model: ModelSpec, table: WrappingTable, strategy: Any) -> ModelSpec:
    asked = Wrapping(**table.model_dump())
    problems = tuple(wrapping.problems(asked, model))
    if problems:
        raise ScenarioError(problems)
    return wrapping.wrapped(model, asked) if strategy is None else wrapped(strategy.name, model, asked)


def _trained_part(model: ModelSpec, table: ModelTable, frozen: tuple[str, ...]) -> ModelSpec:
    """`model` with what is frozen or unused."""
    return training_part.cut(model, frozen=frozen, unused=table.unused)


def _check_transformers(
    model: ModelSpec, table: ModelTable, batch: BatchTable, precision: PrecisionTable, again: CheckpointingTable, units: WrappingTable
) -> None:
    found = transformers_problems.problems(
        model,
        batch=Batch(**batch.model_dump()),
        autocast=precision.autocast,
        checkpointing=Checkpointing(**again.model_dump()),
        wrapping=Wrapping(**units.model_dump()),
        unused=table.unused,
    )
    if problems := tuple(found):
        raise ScenarioError(problems)


def _check_traced(
    model: ModelSpec, batch: BatchTable, precision: PrecisionTable, again: CheckpointingTable, strategy: Any
) -> None:
    """A traced model is one of a batch, a dtype, an autocast, and of some ways to recompute."""
    if isinstance(model, TracedModel):
        dtype = DTYPES[precision.parameters]
        casts_input = STRATEGIES[strategy.name].casts_input and dtype != "float32"
        try:
            model.modules_for(
                Batch(**batch.model_dump()),
                dtype=dtype,
                casts_input=casts_input,
                autograd=STRATEGIES[strategy.name].autograd,
                autocast=_precision(precision).autocast,
                checkpointing=Checkpointing(**again.model_dump()),
            )
        except ZsimError as error:
            raise ScenarioError((f"model.traced: {error}",)) from None


def _check_model(
    model: ModelSpec, options: Any, batch: BatchTable, precision: PrecisionTable, strategy: Any, again: CheckpointingTable
) -> None:
    """What the strategy does not do with such a model: a block that forward passes by, say."""
    casts, waits = precision.reduce != precision.parameters, strategy.sync == "last" and batch.accumulation > 1
    recomputed = recomputed_problems(strategy.name, model, Checkpointing(**again.model_dump()))
    if found := tuple(recomputed) + model_problems(strategy.name, options, model, casts=casts, waits=waits):
        raise ScenarioError(found)


def _check_work(model: ModelSpec, strategy: Any, options: Any, mesh: Mesh, batch: BatchTable) -> None:
    asked = work(model, strategy=strategy.name, options=options, mesh=mesh, batch=Batch(**batch.model_dump()))
    if problem := asked.problem():
        raise ScenarioError((f"{asked.key}: {problem}",))


def _options(strategy: Any) -> Any:
    kind = STRATEGIES[strategy.name].options
    try:
        return kind(**{field.name: getattr(strategy, field.name) for field in fields(kind)})
    except (ValueError, ZsimError) as error:
        raise ScenarioError((f"strategy: {error}",)) from None


def _mesh(strategy: Any, num_ranks: int) -> Mesh:
    """The mesh on the cluster's ranks; one axis that is not given is filled, more than one must be given."""
    axes = STRATEGIES[strategy.name].axes
    sizes = {axis: getattr(strategy, axis) for axis in axes}
    open_axes = [axis for axis, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        found = f"found nothing ({', '.join(axes)} make the mesh)"
        raise ScenarioError((f"strategy.{open_axes[0]}: expected a size, {found}",))
    given = 1
    for size in sizes.values():
        given *= size or 1
    if open_axes:
        if num_ranks % given:
            raise ScenarioError((f"strategy.{axes[0]}: {given} does not divide the cluster's {num_ranks} ranks",))
        sizes[open_axes[0]] = num_ranks // given
    elif given != num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ScenarioError((f"strategy.{axes[0]}: {product} = {given} ranks, but the cluster has {num_ranks}",))
    assert set(sizes) <= set(AXES)
    return Mesh(**sizes)
