"""Two Runs of one scenario, compared in order of rigour: collective order, bytes, memory, numerics,
time.

A check that one side cannot make is `unsupported`, with the reason; no events at all is a failure,
never a pass. It reads Runs and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.order.waits import named_ranks
from zsim.ir.program import PHASES
from zsim.ir.run import RunRecord, both_simulated, ranks_at_fault
from zsim.runs.compare.agreement import FAULTS
from zsim.runs.compare.check import Check, unsupported
from zsim.runs.compare.collectives import (
    compare_bytes,
    compare_groups,
    compare_order,
    compare_wire_bytes,
)
from zsim.runs.compare.memory.cache import compare_caches
from zsim.runs.compare.memory.compare_memory import compare_memory, other_torch
from zsim.runs.compare.numerics import numerics
from zsim.runs.compare.phase_pairs import partners_of, phase_pairs
from zsim.runs.compare.step_time import compare_time
from zsim.runs.compare.timeline import compare_timelines


def compare(predicted: RunRecord, measured: RunRecord) -> tuple[Check, ...]:
    """Every check, most rigorous first.

    Ranks are matched by number; a folded rank stands for those of its kind.
    """
    other = _other_experiment(predicted, measured)
    if other:
        return (Check(name="same experiment", status="failed", detail=other),)
    pairs = tuple(phase_pairs(predicted, measured))
    whole = (
        *_faults(predicted, measured), *_completeness(predicted, measured),
        *_coverage(predicted, measured),
    )
    if not pairs:
        return (
            *whole,
            Check(name="ranks", status="failed", detail="the two Runs have no rank in common"),
        )
    step_time = compare_time(predicted, measured)
    partners = partners_of(predicted)
    ranks = [(partners[rank.rank], rank) for rank in measured.ranks if rank.rank in partners]
    return (
        *whole,
        compare_order(pairs, predicted.world_size),
        compare_bytes(pairs, predicted.world_size),
        *compare_wire_bytes(predicted, measured),
        compare_groups(predicted, measured),
        *compare_memory(pairs, predicted, measured),
        *compare_caches(
            predicted, measured, ranks, blind=other_torch(predicted, measured)
        ),
        numerics(predicted, measured),
        step_time,
        *compare_timelines(predicted, measured, ranks, step_time=step_time),
    )


def _other_experiment(predicted: RunRecord, measured: RunRecord) -> str:
    """The first difference that shows the two Runs to be of different scenarios, or ""."""
    pairs = [
        ("ranks", predicted.world_size, measured.world_size),
        ("mesh", predicted.mesh, measured.mesh),
    ]
    for key in ("strategy", "fingerprint"):
        left, right = predicted.provenance.get(key), measured.provenance.get(key)
        pairs += [(key, left, right)] if left is not None and right is not None else []
    sides = ("predicted", "measured")
    if both_simulated(predicted, measured):
        sides = ("in the first", "in the second")
    return next(
        (
            f"{label}: {left} {sides[0]}, {right} {sides[1]}"
            for label, left, right in pairs
            if left != right
        ),
        "",
    )


def _faults(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The check of Runs of which one had faults: failed where the other had not the same."""
    sides = [sorted(run.faults) for run in (predicted, measured)]
    if sides[0] == sides[1] != []:
        late = [
            f"held up by rank {run.late[0].rank} {word}"
            for run, word in ((predicted, "predicted"), (measured, "measured")) if run.late
        ]
        most = f"; most {', '.join(late)}" if late else ""
        had = f"both Runs had {'; '.join(sides[0])}{most}"
        yield unsupported(FAULTS, f"{had}; a clean step was not compared")
    elif sides[0] != sides[1]:
        texts = ("; ".join(faults) or "none" for faults in sides)
        yield Check(
            name=FAULTS, status="failed", detail="{} predicted, {} measured".format(*texts)
        )


def _completeness(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """The checks that both Runs are whole, or that their faults end them alike."""
    if predicted.faults and not (predicted.complete or measured.complete):
        yield _unended(predicted, measured)
        return
    for word, run in (("predicted", predicted), ("measured", measured)):
        if run.failure or not run.complete:
            why = f": {run.failure}" if run.failure else ""
            yield Check(name="complete", status="failed", detail=f"the {word} Run did not reach "
                                                                 f"its end{why}")
            continue
        phases = run.provenance.get("phases", " ".join(PHASES)).split()  # a trace has one alone
        short = [
            (rank.rank, phase) for rank in run.ranks for phase in phases if phase not in rank.phases
        ]
        if short:
            detail = (
                f"the {word} Run says it is complete, but rank {short[0][0]} has no {short[0][1]} "
                f"phase"
            )
            yield Check(name="complete", status="failed", detail=detail)


def _unended(predicted: RunRecord, measured: RunRecord) -> Check:
    """The check of two Runs that do not end: the same ranks are at fault in both. The Program names
    all of them, a real run the first to fail."""
    left, right = (ranks_at_fault(run) for run in (predicted, measured))
    alike = left == right or not set(left).isdisjoint(right)
    who = f"{_blamed(left)} predicted, {_blamed(right)} measured"
    return Check(
        name="complete", status="ok" if alike else "failed",
        detail=f"neither Run reaches its end; at fault {_blamed(right) if left == right else who}\n"
               f"predicted: {predicted.failure}\nmeasured: {measured.failure}",
    )


def _blamed(ranks: tuple[int, ...]) -> str:
    return named_ranks(ranks) if ranks else "no rank"


def _coverage(predicted: RunRecord, measured: RunRecord) -> Iterator[Check]:
    """Every rank was measured, or the Run says which; and every measured rank was predicted."""
    ranks = {rank.rank for rank in measured.ranks}
    announced = " ".join(str(rank.rank) for rank in measured.ranks)
    if (
        not measured.representatives
        and len(ranks) < measured.world_size
        and measured.provenance.get("ranks") != announced
    ):
        detail = (
            f"{len(ranks)} of {measured.world_size} ranks were measured, and the Run does not say "
            f"that only they were asked for"
        )
        yield Check(name="ranks", status="failed", detail=detail)
    alone = sorted(ranks - set(partners_of(predicted)))
    if alone:
        detail = (
            f"{len(alone)} measured ranks were not predicted, rank {alone[0]} first; predict all "
            f"ranks"
        )
        yield Check(name="ranks", status="failed", detail=detail)
