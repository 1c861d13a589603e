"""A scenario under examination: its Program, step time and peak, and those of a mended one.

Each figure is computed when a rule first asks for it. Costs are differences of such figures, so
they are simulated and never recited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zsim.autograd.traced.model import TracedModel
from zsim.errors import ScenarioError
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Op
from zsim.ir.program import Program
from zsim.memory.full_device import filled
from zsim.models import wrapping
from zsim.models.training_options import DTYPE_NBYTES
from zsim.runs.figures.step_time import step_time
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES, wrapped
from zsim.strategies.strategy import Strategy


@dataclass(frozen=True)
class LintCase:
    """A scenario with its figures, computed once each."""

    scenario: Scenario

    @cached_property
    def planned(self) -> Planned:
        """The scenario with its Program."""
        return planned(self.scenario)

    @property
    def program(self) -> Program:
        """The Program for the scenario's own cluster."""
        return self.planned.program

    @cached_property
    def step_ns(self) -> int:
        """Nanoseconds of the simulated steady step."""
        return step_time(filled(self.planned)).ns

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that torch has allocated in the steady step, on any rank."""
        return max(
            replay(rank, timeline=False)["steady"].peak_bytes for rank in self.program.ranks
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy's entry of the table."""
        return STRATEGIES[self.scenario.strategy]

    @property
    def is_traced(self) -> bool:
        """True for a model that brings its own units."""
        return isinstance(self.scenario.model, TracedModel)

    @property
    def element_nbytes(self) -> int:
        """Bytes of an element of a parameter."""
        return DTYPE_NBYTES[self.scenario.precision.parameters]

    def steady(self, kind: str) -> Iterator[Op]:
        """The ops of one kind in rank 0's steady step."""
        return (op for op in self.program.of_rank(0).steady if op.kind == kind)

    def gathers_of_units(self) -> list[Op]:
        """The all-gathers of one unit each in rank 0's steady step; DeepSpeed gathers buffers and
        parameters, which have names of units at most by chance."""
        is_engine = self.strategy.library == "deepspeed"
        units = set() if is_engine else {unit.fqn for unit in self.scenario.model.units}
        return [op for op in self.steady("all_gather") if op.unit in units]

    def with_parts(self, **parts: Any) -> LintCase | None:
        """The case with other parts; None where the scenario refuses them."""
        other = derived(self.scenario, **parts)
        return None if refusals.problems(other) else LintCase(other)

    def with_options(self, **options: Any) -> LintCase | None:
        """The case with other options of its strategy; None where they are refused."""
        return self.with_parts(options=replace(self.scenario.options, **options))

    def with_wrapping(self, **keys: Any) -> LintCase | None:
        """The case with other units; None where the model cannot have them."""
        policy = replace(self.scenario.wrapping, **keys)
        model = self.scenario.model
        if self.is_traced or any(wrapping.problems(policy, model)):
            return None
        return self.with_parts(
            wrapping=policy, model=wrapped(self.scenario.strategy, model, policy)
        )

    def without(self, table: str, key: str) -> LintCase | None:
        """The case without one key of its tables; None where the rest cannot stand alone, or cannot
        be planned."""
        try:
            change: Any = {table: {key: None}}
            case = LintCase(self.scenario.with_(**change))
            return case if case.program else None
        except ScenarioError:
            return None
