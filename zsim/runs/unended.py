"""Steps that do not end because of faults, held to what their scenario expects of that.

Such a step has no Run, simulated or real: its error says which rank is at fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from zsim.errors import DeadlockError, RankError
from zsim.ir.run import SCHEMA_VERSION, IncompleteRunError
from zsim.scenario import expect
from zsim.scenario.expect import NO_RANK, Verdict
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class UnendedRun:
    """A step that did not end on a backend, where `[expect]` says `ends = false`."""

    scenario: Scenario
    backend: str
    error: DeadlockError | RankError

    @property
    def expectations(self) -> tuple[Verdict, ...]:
        """A verdict on each entry of the scenario's `expect`."""
        named = re.match(r"rank (\d+)\b", self.error.where)
        rank = int(named[1]) if named else NO_RANK
        return expect.check(self.scenario.expect, figures={"ends": False, "at_fault": rank})

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


def expected(scenario: Scenario, error: Exception, *, backend: str) -> UnendedRun | None:
    """The step that `error` has ended, where its scenario expects that; None for another error, as
    of ranks that break down before the step with faults."""
    meant = any(entry.name == "ends" and not entry.value for entry in scenario.expect)
    simulated = isinstance(error, DeadlockError)
    real = isinstance(error, IncompleteRunError) and any(
        "first" in rank.phases for rank in error.run.ranks
    )
    if not (meant and (simulated or real)):
        return None
    assert isinstance(error, DeadlockError | RankError)
    return UnendedRun(scenario=scenario, backend=backend, error=error)
