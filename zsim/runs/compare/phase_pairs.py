"""Phases of ranks in two Runs, predicted and measured, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.ir.program import PHASES
from zsim.ir.run import PhaseRecord, RankRun, RunRecord
from zsim.runs.compare.check import Number


@dataclass(frozen=True, slots=True)
class PhasePair:
    """A phase of a rank, predicted and measured."""

    rank: int
    phase: str
    predicted: PhaseRecord
    measured: PhaseRecord


def phase_pairs(predicted: RunRecord, measured: RunRecord) -> Iterator[PhasePair]:
    """Phases of the measured ranks that both Runs have."""
    partners = partners_of(predicted)
    for rank_run in measured.ranks:
        partner = partners.get(rank_run.rank)
        if partner is None:
            continue
        for phase in PHASES:
            if phase in partner.phases and phase in rank_run.phases:
                yield PhasePair(rank_run.rank, phase, partner.phases[phase], rank_run.phases[phase])


def partners_of(run: RunRecord) -> dict[int, RankRun]:
    """Each rank's own record, or that of the representative of its kind, by rank."""
    shown = {rank.rank: rank for rank in run.ranks}
    alike = {rank: shown[like] for rank, like in enumerate(run.representatives) if like in shown}
    return alike or shown


def relative(predicted: Number, measured: Number) -> float:
    """Difference as a share of what was measured; infinite where that is 0."""
    if predicted == measured:
        return 0.0
    return (predicted - measured) / measured if measured else math.inf
