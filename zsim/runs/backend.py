"""The Backend protocol: what it can measure, how a run is asked for, and the Run it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zsim.scenario.scenario import Scenario
from zsim.ir.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The senses of a backend; compare() reports the checks of all others as `unsupported`."""

    memory: bool
    numerics: bool
    time: bool
    device: str
    """"cpu" or "cuda": what plan() must plan for so that the comparison is fair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: ranks that a fake run observes, all ranks unfolded, the real interpreter,
    and seconds until a rank counts as hung."""

    ranks: tuple[int, ...] | None = None
    all_ranks: bool = False
    interpreter: str | None = None
    timeout_s: float = 120.0


class Backend(Protocol):
    """Anything that turns a scenario into a Run. Found through the entry-point group
    `zsim.backends`; constructed with no arguments."""

    name: str

    def capabilities(self) -> Capabilities:
        """Its senses, or BackendUnavailableError with how to get it."""
        ...

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """Run the scenario; ZsimError (exit code 1) when a rank fails."""
        ...
