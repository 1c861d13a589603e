"""Memory of two Runs: peaks of phases, bytes at rest, by part and by kind."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.host_ledger import OFFLOADED
from zsim.ir.program import PHASES
from zsim.ir.run import RunRecord, sees
from zsim.models import torch_versions
from zsim.runs.compare.check import Check, unsupported
from zsim.runs.compare.memory import at_rest, by_part
from zsim.runs.compare.phase_pairs import PhasePair, relative
from zsim.strategies import STRATEGIES

MEMORY_BOUND = 0.05
"""Share of the measured peak by which one on gloo may differ."""


def compare_memory(
    pairs: tuple[PhasePair, ...], predicted: RunRecord, measured: RunRecord
) -> Iterator[Check]:
    """Peaks of phases within MEMORY_BOUND; bytes at rest, by part and by kind."""
    for phase in PHASES:
        name, in_phase = f"peak memory, {phase}", [pair for pair in pairs if pair.phase == phase]
        if in_phase:
            yield _phase_memory(name, in_phase, _blind(predicted, measured))
        elif not (predicted.complete and measured.complete):
            yield unsupported(name, "a Run did not reach its end")
    yield _rest(pairs, predicted, measured)
    yield _parts(
        [pair for pair in pairs if pair.phase != "construction"], predicted, measured
    )
    blind = _blind(predicted, measured)
    if not blind and any(pair.measured.memory.held for pair in pairs):
        yield _memory_by_kind([pair for pair in pairs if pair.phase != "construction"])
    else:
        reason = blind or "the measured Run does not tell what its ranks hold"
        yield unsupported("memory by kind", reason)


def _rest(pairs: tuple[PhasePair, ...], predicted: RunRecord, measured: RunRecord) -> Check:
    """Construction's end, and both ends of both steps."""
    blind = _blind(predicted, measured)
    if blind:
        return unsupported(at_rest.NAME, blind)
    return at_rest.compare_rest(
        [
            at_rest.PhaseMemory(
                rank=pair.rank, name=pair.phase, predicted=pair.predicted.memory,
                measured=pair.measured.memory,
            )
            for pair in pairs
        ]
    )


def _parts(pairs: list[PhasePair], predicted: RunRecord, measured: RunRecord) -> Check:
    """Forward, backward, optimizer and zero_grad of both steps."""
    blind = _blind(predicted, measured)
    if blind or not pairs:
        return unsupported(by_part.NAME, blind or "no step was ended")
    steps = [
        by_part.StepMemory(
            rank=pair.rank, phase=pair.phase, predicted=pair.predicted.memory,
            measured=pair.measured.memory,
        )
        for pair in pairs
    ]
    return by_part.compare_parts(
        steps, exact=measured.provenance.get("memory") == by_part.EXACT,
        bound=MEMORY_BOUND,
    )


def _memory_by_kind(pairs: list[PhasePair]) -> Check:
    """The check of the bytes that ranks hold from step to step, by kind, exact to the byte."""
    for pair in pairs:
        wanted_kinds, held = pair.predicted.memory.held, pair.measured.memory.held
        unseen = {OFFLOADED} - held.keys()  # torch's own offloading does not tell
        for kind in sorted({*wanted_kinds, *held} - unseen):
            nbytes, wanted = held.get(kind, 0), wanted_kinds.get(kind, 0)
            if nbytes != wanted:
                where = (
                    f"rank {pair.rank}, {pair.phase}: {kind}: predicted {wanted:,} B, measured "
                    f"{nbytes:,} B"
                )
                return Check(
                    name="memory by kind", status="failed", predicted=wanted, measured=nbytes,
                    detail=where,
                )
    by_kind = pairs[-1].measured.memory.held
    kinds = ", ".join(f"{kind} {nbytes:,} B" for kind, nbytes in by_kind.items())
    total = sum(by_kind.values())
    return Check(
        name="memory by kind", status="ok", predicted=total, measured=total,
        detail=f"exact    {kinds}",
    )


def _phase_memory(name: str, pairs: list[PhasePair], blind: str) -> Check:
    if blind:
        return unsupported(name, blind)
    if any(pair.measured.memory.peak_bytes <= 0 for pair in pairs):
        return Check(name=name, status="failed", detail="no memory was observed at all")
    worst = max(pairs, key=lambda pair: (abs(_peak_error(pair)), -pair.rank))
    error = _peak_error(worst)
    left, right = worst.predicted.memory.peak_bytes, worst.measured.memory.peak_bytes
    return Check(
        name=name,
        status="ok" if abs(error) <= MEMORY_BOUND else "failed",
        predicted=left,
        measured=right,
        relative_error=error,
        detail=_memory_detail(worst, len({pair.rank for pair in pairs})),
    )


def _peak_error(pair: PhasePair) -> float:
    return relative(pair.predicted.memory.peak_bytes, pair.measured.memory.peak_bytes)


def _memory_detail(pair: PhasePair, num_ranks: int) -> str:
    left, right = pair.predicted.memory, pair.measured.memory
    peak_at = f" ({right.peak_at or left.peak_at})" if right.peak_at or left.peak_at else ""
    if left.peak_bytes == right.peak_bytes:
        ranks = (
            f"on rank {pair.rank}"
            if num_ranks == 1
            else f"on rank {pair.rank}, exact on all {num_ranks} observed"
        )
        return f"exact    {right.peak_bytes:,} B {ranks}{peak_at}"
    word = "within" if abs(_peak_error(pair)) <= MEMORY_BOUND else "beyond"
    difference = left.peak_bytes - right.peak_bytes
    return (
        f"{word} {MEMORY_BOUND:.0%}: predicted {left.peak_bytes:,} B, measured "
        f"{right.peak_bytes:,} B on rank {pair.rank}, "
        f"{difference:+,} B, {_peak_error(pair):+.2%}{peak_at}"
    )


def _blind(predicted: RunRecord, measured: RunRecord) -> str:
    if blind := [run.backend for run in (predicted, measured) if not sees(run, "memory")]:
        return f"{' and '.join(blind)} cannot see memory"
    return other_torch(predicted, measured)


def other_torch(predicted: RunRecord, measured: RunRecord) -> str:
    """The reason that memory of torch's strategy cannot be compared, as for another torch; or "".

    `zsim validate` predicts for the torch that ran, a simulation alone for the newest.
    """
    if "torch" not in predicted.provenance or measured.interpreter != "observer":
        return ""
    planned, ran = (
        torch_versions.version_of(run.provenance.get("torch", "")) for run in (predicted, measured)
    )
    strategy = STRATEGIES.get(measured.provenance.get("strategy", ""))
    apart = (
        torch_versions.apart(planned, ran, library=strategy.library) if strategy is not None else ()
    )
    return (
        f"predicted for torch {planned}, measured with torch {ran}, which differ: "
        f"{'; '.join(each.meaning for each in apart)}"
        if apart else ""
    )
