"""The work of simulating a scenario, from its sizes alone: minutes of it are refused before they
begin.

A rank costs its ops, which grow with param groups and micro-batches. Ranks that are alike are
simulated once, so the kinds of ranks count. A further rank of a kind costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zsim.ir.mesh import Mesh
from zsim.models.repeats import most_runs
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch
from zsim.strategies import STRATEGIES

MAX_RANKS = 1_000_000
"""Ranks: ten seconds for looking once at each."""
MAX_PASSES = 12_000
"""Param groups × micro-batches: the ops of one rank; half a minute of work."""
MAX_WORK = 750_000
"""Ranks simulated × param groups × micro-batches: a minute of work."""
MAX_BY_COLUMNS = 2_200_000
"""The same of ranks that are all distinct, where they are simulated by columns and few are kept: a
minute of work, and 4 GB. 16,384 ranks × 128 groups of Llama 3 405B are 2,097,152."""
SLOWEST = "1 Mbit/s"
"""Least bandwidth of a slow link. A step over less takes days: another unit is meant."""
MANY_TIMES = 3
"""Analyses that simulate a scenario again and again are allowed this part of each limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The factors of a simulation's work; `num_units` are the param groups that travel one by one,
    `passes` run over each of them."""

    num_ranks: int
    kinds: int
    num_units: int
    passes: int

    @property
    def key(self) -> str:
        """The scenario's key that makes most of it."""
        if self.num_ranks > MAX_RANKS:
            return "cluster"
        return "batch.accumulation" if self.passes > 1 else "model"

    def problem(
        self, *, all_ranks: bool = False, part: int = 1, by_columns: bool = False
    ) -> str:
        """The limit that this work exceeds, or ""; of each limit one `part`-th is allowed."""
        if self.num_ranks > MAX_RANKS // part:
            return f"expected at most {MAX_RANKS // part:,} ranks, found {self.num_ranks:,}"
        ops, factors = self.num_units * self.passes, f"{self.num_units:,} × {self.passes:,}"
        if ops > MAX_PASSES // part:
            limit = f"param groups × micro-batches of at most {MAX_PASSES // part:,}"
            return f"expected {limit}, found {factors} = {ops:,}; take fewer of one of them"
        ranks, called = (self.num_ranks, "ranks") if all_ranks else (self.kinds, "kinds of ranks")
        most = (MAX_BY_COLUMNS if by_columns else MAX_WORK) // part
        if ranks * ops > most:
            limit = f"{called} × param groups × micro-batches of at most {most:,}"
            return (
                f"expected {limit}, found {ranks:,} × {factors} = {ranks * ops:,}; take fewer of "
                f"one of them"
            )
        return ""


def work(model: ModelSpec, *, strategy: str, options: Any, mesh: Mesh, batch: Batch) -> Work:
    """The work of simulating a step of `model` by the strategy of that name."""
    traits = STRATEGIES[strategy]
    return Work(
        num_ranks=mesh.world_size,
        kinds=min(mesh.world_size, traits.num_distinct_ranks(model, mesh)),
        num_units=traits.num_groups(options, model) * most_runs(model),
        passes=batch.accumulation * batch.forwards,
    )
