"""Faults of scenarios against what a backend, or an analysis, can do with them: the rest is refused
by name."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.engine.faults.fault import SlowLink
from zsim.errors import ArgumentError, BackendUnavailableError
from zsim.scenario.scenario import Scenario

REASONS = {
    "jitter": "real steps have a jitter of their own",
    "reordered_collective": "torch issues a strategy's collectives in an order of its own",
    "slow_link": "links of real ranks are shaped by --testbed, not by a scenario",
    "lost_link": "links of real ranks are shaped by --testbed, not by a scenario",
}
"""The reason why real ranks cannot have a fault of a kind that the simulator knows."""


def require(scenario: Scenario, kinds: Sequence[str], *, backend: str) -> None:
    """BackendUnavailableError for the first fault that is of none of the `kinds` that ranks of the
    backend can have."""
    for number, fault in enumerate(scenario.faults):
        if fault.kind not in kinds:
            known = ", ".join(kinds) or "none"
            reason = REASONS.get(fault.kind, "ranks over gloo have it, started by zsim itself")
            raise BackendUnavailableError(
                where=f"{scenario.name}: faults[{number}].kind",
                expected=f"a fault that ranks of {backend} can have ({known})",
                found=fault.kind, remedy=f"{reason}; the backend sim has all of them",
            )


def require_none(scenario: Scenario, *, purpose: str) -> None:
    """ArgumentError for a scenario with faults but slow links, where `purpose` is about clean
    steps."""
    for fault in scenario.faults:
        if not isinstance(fault, SlowLink):
            raise ArgumentError(
                where=f"{scenario.name}: faults", expected=f"none for {purpose}, or slow links",
                found=fault.kind,
                remedy="leave it out: scenario.with_(faults=None), or a file without it",
            )
