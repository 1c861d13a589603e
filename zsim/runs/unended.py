"""Steps that do not end because of faults, held to what their scenario expects of that.

Such a step has an error in place of a Run, simulated or real. The error says which rank is at
fault, and keeps what the ranks had ended before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zsim.ir.run import (
    SCHEMA_VERSION,
    IncompleteRunError,
    RunRecord,
    UnendedRunError,
    ranks_at_fault,
)
from zsim.runs.compare.check import Check
from zsim.scenario import expect
from zsim.scenario.expect import NO_RANK, Verdict
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class UnendedRun:
    """A step that did not end on a backend, where `[expect]` says `ends = false`."""

    scenario: Scenario
    backend: str
    error: UnendedRunError | IncompleteRunError

    @property
    def expectations(self) -> tuple[Verdict, ...]:
        """A verdict on each entry of the scenario's `expect`."""
        return _verdicts(self.scenario, self.error.run)

    @property
    def ok(self) -> bool:
        """True where the rank is at fault that the scenario names, if it names one."""
        return all(verdict.ok for verdict in self.expectations)

    def to_dict(self) -> dict[str, Any]:
        """The object of `zsim run --json` for such a scenario; its keys are those of a Run's."""
        return {
            "schema_version": SCHEMA_VERSION, "scenario": self.scenario.name,
            "backend": self.backend, "world_size": self.scenario.world_size, "ended": False,
            "error": str(self.error), "faults": [*map(str, self.scenario.faults)],
            "expectations": [verdict.to_dict() for verdict in self.expectations], "ok": self.ok,
        }


def is_meant(scenario: Scenario) -> bool:
    """True where `[expect]` says `ends = false`."""
    return any(entry.name == "ends" and not entry.value for entry in scenario.expect)


def expected(scenario: Scenario, error: Exception, *, backend: str) -> UnendedRun | None:
    """Unended step of `error`, if the scenario expects one; None for an error before that step."""
    if not (is_meant(scenario) and isinstance(error, UnendedRunError | IncompleteRunError)):
        return None
    if not any("first" in rank.phases for rank in error.run.ranks):
        return None
    return UnendedRun(scenario=scenario, backend=backend, error=error)


def checks(scenario: Scenario, predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The checks of `[expect]` on both sides, where it says that the step does not end."""
    if not is_meant(scenario):
        return
    sides = (_verdicts(scenario, run) for run in (predicted, measured))
    for left, right in zip(*sides, strict=True):
        yield Check(
            name=f"expect.{left.name}", status="ok" if left.ok and right.ok else "failed",
            detail=f"{left.expected} expected, {left.actual} predicted, {right.actual} measured",
        )


def _verdicts(scenario: Scenario, run: RunRecord) -> tuple[Verdict, ...]:
    rank, *others = ranks_at_fault(run) or (NO_RANK,)
    figures = {"ends": run.complete, "at_fault": NO_RANK if others else rank}
    return expect.check(scenario.expect, figures=figures)
