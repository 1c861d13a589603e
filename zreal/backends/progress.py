"""Progress of a real run, by rank or by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zreal.processes.rank_status import RankStatus


def on_rank(
    rank: int, scenario: str, progress: Callable[[str], None]
) -> Callable[[str], None]:
    """`progress` that names scenario and rank, at most twice a second."""
    last = [0.0]

    def told(text: str) -> None:
        now = time.monotonic()
        if now - last[0] > 0.5:
            last[0] = now
            progress(f"{scenario}: rank {rank}, {text}")

    return told


def at_phase(
    scenario: Scenario, progress: Callable[[str], None]
) -> Callable[[list[RankStatus]], None]:
    """`progress` that names scenario and phase, whenever ranks have come to another."""
    from zreal.processes.rank_status import phase
    from zreal.processes.reference_cost import num_steps

    last = [""]

    def told(ranks: list[RankStatus]) -> None:
        text = phase(ranks, num_steps(scenario))
        if text not in ("", last[0]):
            last[0] = text
            progress(f"{scenario.name}: {text}")

    return told
