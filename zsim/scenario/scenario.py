"""Scenario files: TOML text to a whole, frozen Scenario; every problem listed with file and key.

`schema` has checked each key by itself, and `assembly` makes of the tables what the Scenario
consists of.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError
from zsim.io import limits
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario.assemble import assembled
from zsim.scenario.expect import Expectation
from zsim.scenario.table_checks import each_key_once, parts, strategy_of
from zsim.scenario.work_limits import Work, work
from zsim.strategies import STRATEGIES

OUTSIDE_THE_TRAINING = ("description", "cluster", "allocator", "execution", "expect")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole scenario, checked. `text` is what it was read from, so that ranks of a real run read
    the same."""

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
    """Whether torch's caching allocator grows segments page by page instead of taking fixed ones
    (PYTORCH_CUDA_ALLOC_CONF)."""
    steps: int
    seed: int
    expect: tuple[Expectation, ...]
    text: str
    folder: str

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that depend on what is trained and how, as the file says it,
        and not on where or what is expected."""
        table = {
            key: value
            for key, value in tomllib.loads(self.text).items()
            if key not in OUTSIDE_THE_TRAINING
        }
        said = json.dumps([table, self.mesh.shape], sort_keys=True, default=str)
        if {"huggingface", "traced"} & set(table.get("model", {})):
            said += repr(self.model)  # the text names only the file that says it
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this one names: a config.json, a traced model, a cluster's."""
        table = tomllib.loads(self.text)
        named = [table["model"].get(key) for key in ("huggingface", "traced")] + [
            table["cluster"].get("file")
        ]
        return tuple(Path(self.folder) / name for name in named if name)

    @property
    def executed(self) -> Execution:
        """`execution` by this strategy on this cluster: FSDP's hooks take the host time, and on a
        CPU do one thing after another."""
        hooks = STRATEGIES[self.strategy].hooks
        return replace(
            self.execution, hooks=hooks, synchronous=hooks and self.cluster.kind == "cpu"
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.world_size

    @property
    def work(self) -> Work:
        """How much work it is to simulate."""
        return work(
            self.model, strategy=self.strategy, options=self.options, mesh=self.mesh,
            batch=self.batch,
        )


def load(path: str | Path) -> Scenario:
    """The scenario in a file; ScenarioError listing every problem, each with file and key."""
    file = Path(path)
    try:
        if not file.is_file():
            raise ScenarioError((f"{file}: no such file, or not a plain one; `zsim list "
                                 f"scenarios` shows those there are",))
        with file.open("rb") as stream:
            data = stream.read(limits.MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((f"{file}: cannot be read: {error.strerror}",)) from None
    return parse(data, where=str(file), folder=file.parent)


def parse(data: bytes, *, where: str, folder: Path | None = None) -> Scenario:
    """The scenario in `data`; `where` names it in messages, `folder` is where a config.json is
    looked for."""
    text = limits.check_text(data, where=where)
    try:
        table = tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ScenarioError((f"{where}: not TOML: {str(error)[:200]}",)) from None
    problems = list(limits.number_problems(table))
    tables = parts(table, problems)
    strategy = strategy_of(table.get("strategy"), problems)
    made = assembled(tables, strategy, folder=folder, problems=problems)
    if problems or made is None:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in each_key_once(problems)))
    return Scenario(
        name=Path(where).stem,
        description=tables["description"],
        model=made.model,
        batch=made.batch,
        cluster=made.cluster,
        mesh=made.mesh,
        strategy=strategy.name,
        options=made.options,
        sync=strategy.sync,
        precision=made.precision,
        optimizer=made.optimizer,
        checkpointing=made.checkpointing,
        wrapping=made.wrapping,
        execution=made.execution,
        expandable_segments=tables["allocator"].expandable_segments,
        steps=tables["steps"],
        seed=tables["seed"],
        expect=made.expect,
        text=text,
        folder=str(folder or "."),
    )
