"""A whole training scenario, from a TOML file or from Python, checked; every problem is listed with
its key.

A Scenario's tables are its one source: fingerprint, files and TOML text follow from them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

from zsim.autograd.traced.model import TracedModel
from zsim.cluster.cluster import ClusterSpec
from zsim.engine.execution import Execution, Products
from zsim.engine.faults.fault import Fault
from zsim.errors import ArgumentError, ScenarioError, visible
from zsim.io import limits
from zsim.io.arguments import described, path_of
from zsim.io.files import not_a_file
from zsim.io.notebook.html_table import html_table
from zsim.io.units import counted
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.models.saving import Checkpoint
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Dtype, Offload, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario import tables as scenario_tables
from zsim.scenario.checks.work_limits import Work, work
from zsim.scenario.expect import Expectation
from zsim.scenario.keys.table_checks import each_key_once, faults_of, parts, strategy_of
from zsim.scenario.parts.assemble import assemble
from zsim.scenario.tables import Tables, in_order, in_signature
from zsim.strategies import STRATEGIES

OUTSIDE_THE_TRAINING = (
    "description", "cluster", "allocator", "execution", "faults", "expect", "lint", "checkpoint"
)
IN_PYTHON = "Scenario"
"""Stands in messages where a file's name stands for a scenario from a file."""
KEPT: Any = ...
"""Default of what `with_` leaves as it is."""


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False)
class Scenario:
    """A whole training scenario, checked: `model`, `batch`, `cluster` and the rest as objects.

    Built from the tables of a scenario file as dicts, or read by `load`. ScenarioError lists all
    that is wrong with the tables, each with its key.

    >>> scenario = Scenario(
    ...     model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
    ...     cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
    ... )
    >>> scenario
    <Scenario: gpt-tiny, fsdp2 on 4 ranks of cpu-gloo, 2 × 64 tokens a micro-batch>
    >>> scenario.mesh.dp_shard
    4
    """

    name: str = field(compare=False)
    """The file's without its suffix; "scenario" by default for one from Python."""
    description: str
    model: ModelSpec
    batch: Batch
    cluster: ClusterSpec
    mesh: Mesh
    strategy: str
    options: Any
    """The strategy's own options."""
    sync: Literal["every", "last"]
    precision: Precision
    optimizer: Optimizer
    offload: Offload
    """States in host memory; of fsdp2 and hsdp their own option says it."""
    checkpointing: Checkpointing
    wrapping: Wrapping
    execution: Execution
    checkpoint: Checkpoint
    faults: tuple[Fault, ...]
    """Faults and stragglers of the steady step; () for none."""
    expandable_segments: bool
    """torch's caching allocator grows segments page by page instead of taking fixed ones
    (PYTORCH_CUDA_ALLOC_CONF)."""
    steps: int
    seed: int
    expect: tuple[Expectation, ...]
    lint_ignore: tuple[str, ...]
    """Rules of `zsim lint` that are not asked of it."""
    folder: str = field(compare=False)
    """Folder of the files that its tables name."""
    _tables: dict[str, Any] = field(compare=False)
    """Scenarios are equal that mean the same, however they are written, named or kept."""

    @in_signature(None)
    def __init__(
        self, *, name: str = "scenario", folder: str | PathLike[str] = ".", **tables: Unpack[Tables]
    ) -> None:
        problems: list[str] = []
        if not isinstance(name, str) or not name or not name.isprintable():
            problems.append(f"name: expected text in one line, found {described(name)}")
        beside = Path(".")
        try:
            beside = path_of(folder, where="folder")
        except ArgumentError as error:
            problems.append(str(error))
        unwritable: list[str] = []
        made = scenario_tables.plain(in_order(tables), unwritable)
        if unwritable:  # the rest is not whole
            told_of = [*problems, *unwritable]
            raise ScenarioError(tuple(f"{IN_PYTHON}: {problem}" for problem in told_of))
        self._fill(made, where=IN_PYTHON, name=name, folder=beside, problems=problems)

    def _fill(
        self, tables: dict[str, Any], *, where: str, name: str, folder: Path | None,
        problems: Sequence[str] = (),
    ) -> None:
        """All fields from `tables`, or ScenarioError with `where` in front of each problem."""
        values = _values(tables, where=where, folder=folder, problems=problems)
        values |= {"name": name, "folder": str(folder or "."), "_tables": tables}
        for slot in fields(self):
            object.__setattr__(self, slot.name, values[slot.name])

    @in_signature(KEPT)
    def with_(self, *, name: str = KEPT, **tables: Unpack[Tables]) -> Scenario:
        """The scenario with these tables merged into its own, key by key, and checked anew.

        A table or a key with None is removed, as if it had never been written. The table of
        another strategy replaces the whole one. Another way to name model or cluster drops the way
        before it.

        >>> small = Scenario(
        ...     model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
        ...     cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
        ... )
        >>> small.with_(batch={"micro_batch": 8}, strategy={"name": "ddp"})
        <Scenario: gpt-tiny, ddp on 4 ranks of cpu-gloo, 8 × 64 tokens a micro-batch>
        """
        changes = in_order(tables)
        if "folder" in changes:
            raise ArgumentError(
                where="with_: folder", expected="tables and a name",
                found=described(changes["folder"]),
                remedy="zsim.load reads a scenario's file in another folder",
            )
        merged: Any = scenario_tables.merged(self._tables, changes)
        made = Scenario(**merged, name="scenario" if name is KEPT else name, folder=self.folder)
        if name is KEPT:
            object.__setattr__(made, "name", self.name)
        return made

    def __repr__(self) -> str:
        name = "" if self.name == "scenario" else f" {visible(self.name)}"
        batch = f"{self.batch.micro_batch:,} × {self.batch.sequence_length:,} tokens a micro-batch"
        return (
            f"<Scenario{name}: {self.model.name}, {self.strategy} on "
            f"{counted(self.world_size, 'rank')} of {self.cluster.name}, {batch}>"
        )

    def _repr_html_(self) -> str:
        """The scenario's main choices as a table, for notebooks."""
        batch = self.batch
        return html_table(f"Scenario {visible(self.name)}", (), [
            ("model", f"{self.model.name}, {self.model.num_parameters:,} parameters"),
            ("batch", f"{batch.micro_batch:,} × {batch.sequence_length:,} tokens, "
                      f"{batch.accumulation:,} micro-batches a step"),
            ("cluster", f"{self.cluster.name}, {self.mesh}"),
            ("strategy", self.strategy),
            ("precision", f"parameters in {self.precision.parameters}"),
            ("optimizer", f"{self.optimizer.name}, {self.optimizer.implementation}"),
            ("activation checkpointing", self.checkpointing.mode),
        ])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """A line in notebooks, and in examples of hypothesis, which would print every field."""
        printer.text(repr(self))

    @property
    def tables(self) -> dict[str, Any]:
        """The scenario as a file would have it, in a new dict: nothing but what was written."""
        return deepcopy(self._tables)

    def to_dict(self) -> dict[str, Any]:
        """The tables, as `Scenario(**tables)` takes them."""
        return self.tables

    def to_json(self) -> str:
        """`to_dict` as JSON text; dates of TOML as text."""
        return json.dumps(self.tables, indent=2, allow_nan=False, default=str)

    def to_toml(self, *, folder: str | PathLike[str] | None = None) -> str:
        """The scenario as TOML text, for a file in `folder`: by default that of its own file.

        >>> print(Scenario(
        ...     model={"preset": "gpt-tiny"}, batch={"micro_batch": 2},
        ...     cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "ddp"},
        ... ).to_toml())
        model = { preset = "gpt-tiny" }
        batch = { micro_batch = 2 }
        cluster = { preset = "cpu-gloo", ranks = 4 }
        strategy = { name = "ddp" }
        <BLANKLINE>
        """
        tables = scenario_tables.seen_from(folder, self._tables, self.folder)
        return scenario_tables.to_toml(tables)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that depend on what is trained and how, as the tables have it,
        and not on where or what is expected. Of `execution` the forms of norms and loss count, and
        the dtype in which gradients are added up."""
        table = {
            key: value for key, value in self._tables.items() if key not in OUTSIDE_THE_TRAINING
        }
        text = json.dumps([table, self.mesh.shape], sort_keys=True, default=str)
        forms = [self.execution.norms, self.execution.loss]
        if set(forms) != {"fused"}:
            text += json.dumps(forms)
        if self.gradient_dtype != self.precision.parameters:
            text += self.gradient_dtype
        if "huggingface" in table.get("model", {}) or isinstance(self.model, TracedModel):
            text += repr(self.model)  # the tables name only the file that says it, if any does
        from hashlib import sha256  # start-up: it loads OpenSSL, which many commands need not

        return sha256(text.encode()).hexdigest()[:12]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this one names: a config.json, a traced model, a cluster's."""
        named = (self._tables[table].get(key) for table, key in scenario_tables.FILES)
        return tuple(Path(self.folder) / file for file in named if file)

    @property
    def executed(self) -> Execution:
        """`execution` by this strategy on this cluster: FSDP's hooks take the host time. On a CPU
        they, and the executor of own strategies, do one thing after another."""
        return self.executed_on(self.cluster)

    def executed_on(self, cluster: ClusterSpec) -> Execution:
        """`executed` where `cluster` stands in for the scenario's own."""
        strategy, on_cpu = STRATEGIES[self.strategy], cluster.kind == "cpu"
        products: Products = "alone" if cluster.num_ranks == 1 else "training"
        return replace(
            self.execution, products=self.execution.products or products,
            hooks=strategy.hooks, dtensors=strategy.dtensors and on_cpu,
            torchrun=strategy.torchrun and not on_cpu, by_call=isinstance(self.model, TracedModel),
            drive_queue_nbytes=self.offload.drive_queue_nbytes,
            wide_products=self.precision.products == "float32",
            synchronous=on_cpu
            and (strategy.hooks > 0 or (strategy.is_own and not cluster.has_idle_cores)),
        )

    @property
    def gradient_dtype(self) -> Dtype:
        """The dtype in which a strategy that keeps gradients in its own buffers adds them up."""
        wide = STRATEGIES[self.strategy].is_own and self.execution.accumulation == "fp32"
        return "float32" if wide else self.precision.parameters

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.world_size

    @property
    def work(self) -> Work:
        """The work of simulating it."""
        return work(
            self.model, strategy=self.strategy, options=self.options, mesh=self.mesh,
            batch=self.batch,
        )


def load(path: str | PathLike[str]) -> Scenario:
    """The scenario in a TOML file.

    ScenarioError lists every problem, each with file and key, and how to mend it.
    """
    expected, remedy = "the path of a scenario's file", "zsim.Scenario(**tables) takes the tables"
    if path == "":
        raise ArgumentError(where="path", expected=expected, found='""', remedy=remedy)
    file = path_of(path, where="path", expected=expected, remedy=remedy)
    try:
        if not file.is_file():
            remedy = "`zsim list scenarios` shows those there are, and `zsim new` makes one"
            raise ScenarioError((f"{file}: {not_a_file(file)}; {remedy}",))
        with file.open("rb") as stream:
            data = stream.read(limits.MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((f"{file}: cannot be read: {error.strerror}",)) from None
    return parse(data, where=str(file), folder=file.parent)


def parse(data: bytes, *, where: str, folder: Path | None = None) -> Scenario:
    """The scenario in `data`; `where` names it in messages, files are looked for in `folder`."""
    text = limits.check_text(data, where=where)
    try:
        tables = tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ScenarioError((f"{where}: not TOML: {str(error)[:200]}",)) from None
    return from_tables(tables, where=where, folder=folder)


def from_tables(tables: dict[str, Any], *, where: str, folder: Path | None = None) -> Scenario:
    """The scenario of the `tables` of a file, as TOML has them; `where` and `folder` as of `parse`.
    """
    made = object.__new__(Scenario)
    made._fill(tables, where=where, name=Path(where).stem, folder=folder)
    return made


def _values(
    tables: dict[str, Any], *, where: str, folder: Path | None, problems: Sequence[str]
) -> dict[str, Any]:
    """A Scenario's fields by name, as `tables` say; ScenarioError with `where` in front of each
    problem, those that are known first."""
    if not tables:
        needed = "the tables model, batch, cluster and strategy"
        remedy = "`zsim list scenarios` names files to begin with"
        raise ScenarioError((f"{where}: expected {needed}, found none; {remedy}",))
    problems = [*problems, *limits.number_problems(tables)]
    checked = parts(tables, problems)
    strategy = strategy_of(tables.get("strategy"), problems)
    faults = faults_of(checked["faults"], problems)
    made = assemble(checked, strategy, faults=faults, folder=folder, problems=problems)
    if problems:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in each_key_once(problems)))
    return {part.name: getattr(made, part.name) for part in fields(made)} | {
        "description": checked["description"],
        "expandable_segments": checked["allocator"].expandable_segments,
        "lint_ignore": checked["lint"].ignore,
        "steps": checked["steps"], "seed": checked["seed"],
    }
