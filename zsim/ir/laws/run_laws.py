"""Laws that every honest Run obeys, whatever the backend; those of Programs are
`zsim.ir.laws.program_laws`'.

A law is a function that yields its breaches as text. Their table names them, and `run_breaches`
asks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zsim.errors import ZsimError
from zsim.ir.host_ledger import ON_HOST
from zsim.ir.ledger_replay import HELD
from zsim.ir.ops import COLLECTIVES, MEMORY_KINDS
from zsim.ir.run import RankRun, RunRecord

RunLaw = Callable[[RunRecord, RankRun], Iterator[str]]


class LawError(ZsimError):
    """A Run that breaks a law: a defect of the backend that made it."""

    exit_code = 1


def require_lawful(
    run: RunRecord, *, where: str, remedy: str = "this is a defect of the backend"
) -> None:
    """LawError, with the first breaches by name, for a Run that breaks a law."""
    broken = run_breaches(run)
    if broken:
        raise LawError(
            where=where, expected="a run that obeys the laws of zsim.ir.laws.run_laws",
            found="; ".join(broken[:8]), remedy=remedy,
        )


def run_breaches(run: RunRecord) -> tuple[str, ...]:
    """Every breach of a law in `run`, as "law: rank n: breach"; ranks that share a record are asked
    once."""
    distinct = {
        (id(rank.phases), id(rank.spans), id(rank.numerics), rank.stands_for): rank
        for rank in run.ranks
    }.values()
    return tuple(
        f"{name}: rank {rank.rank}: {breach}"
        for name, law in RUN_LAWS.items()
        for rank in distinct
        for breach in law(run, rank)
    )


def one_thing_at_a_time(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """Spans of one stream do not overlap."""
    ends: dict[str, tuple[int, str]] = {}
    for span in sorted(
        (s for s in rank.spans if s.stream != "host"), key=lambda span: (span.start_ns, span.end_ns)
    ):
        end, name = ends.get(span.stream, (0, ""))
        if span.start_ns < end:
            yield (
                f"{span.name} starts at {span.start_ns:,} ns on stream {span.stream}, where {name} "
                f"runs until {end:,} ns"
            )
        ends[span.stream] = (span.end_ns, span.name)


def spans_lie_in_the_step(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """Nothing begins before the step or ends after it, or before its own beginning."""
    step_ns = rank.recorded_step_ns or run.step_time_ns or 0
    for span in rank.spans:
        if not 0 <= span.start_ns <= span.end_ns <= step_ns:
            yield (
                f"{span.name} runs from {span.start_ns:,} to {span.end_ns:,} ns in a step of "
                f"{step_ns:,} ns"
            )


def peaks_are_the_highest_points(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """A peak is at least what a phase starts and ends with and what its timeline shows; its kinds
    sum to it."""
    for name, phase in rank.phases.items():
        memory = phase.memory
        points = (memory.start_bytes, memory.end_bytes, *(nbytes for _, nbytes in memory.timeline))
        if memory.peak_bytes < max(points):
            yield f"{name}: a peak of {memory.peak_bytes:,} B below {max(points):,} B"
        if memory.by_kind and sum(memory.by_kind.values()) != memory.peak_bytes:
            yield (
                f"{name}: kinds of {sum(memory.by_kind.values()):,} B at a peak of "
                f"{memory.peak_bytes:,} B"
            )


def sizes_are_possible(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """Memory has no kinds but the known ones, nothing is less than no bytes, and what a rank holds
    fits under its peak."""
    for name, phase in rank.phases.items():
        memory = phase.memory
        unknown = [
            *(set(memory.by_kind) - set(MEMORY_KINDS)), *(set(memory.held) - {*HELD, *ON_HOST})
        ]
        if unknown:
            yield f"{name}: memory of no known kind, {min(unknown)[:40]}"
        levels = (memory.start_bytes, memory.end_bytes, *(nbytes for _, nbytes in memory.timeline))
        least = min(*levels, *memory.by_kind.values(), *memory.held.values())
        if least < 0:
            yield f"{name}: {least:,} B of memory"
        held = sum(nbytes for kind, nbytes in memory.held.items() if kind not in ON_HOST)
        if held > memory.peak_bytes:
            yield (
                f"{name}: {held:,} B held at a peak of {memory.peak_bytes:,} B"
            )


def real_ranks_stand_for_themselves(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """Only simulated ranks are folded: a rank of a real run says nothing of another. Every rank
    stands for itself at least."""
    if rank.stands_for < 1:
        yield f"stands for {rank.stands_for:,} ranks"
    if run.interpreter != "simulator" and (run.representatives or rank.stands_for != 1):
        yield (
            f"run for real by the {run.interpreter}, it stands for {rank.stands_for:,} ranks or "
            f"has others stand for it"
        )
    if run.representatives and run.representatives.count(rank.rank) != rank.stands_for:
        yield (
            f"stands for {rank.stands_for:,} ranks, and is named for "
            f"{run.representatives.count(rank.rank):,}"
        )


def numerics_tell_every_step(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """A rank with a steady step has taken two steps at least, with a loss and the reference's loss
    for each."""
    numerics = rank.numerics
    if numerics is None:
        return
    if "steady" in rank.phases and numerics.steps < 2:
        yield f"numerics of {numerics.steps} steps, though there is a steady one after the first"
    if not len(numerics.losses) == len(numerics.reference_losses) == numerics.steps:
        yield (
            f"{len(numerics.losses)} losses and {len(numerics.reference_losses)} of the reference "
            f"for {numerics.steps} steps"
        )


def parts_lie_in_their_phase(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """No part of a step starts or peaks above the step's peak, or starts above its own."""
    for name, phase in rank.phases.items():
        for part in phase.memory.parts:
            if not 0 <= part.start_bytes <= part.peak_bytes <= phase.memory.peak_bytes:
                levels = f"{part.start_bytes:,} B at its start and a peak of {part.peak_bytes:,} B"
                yield (
                    f"{name}: {part.name} {part.micro_batch} with {levels} in a phase that peaks "
                    f"at {phase.memory.peak_bytes:,} B"
                )


def one_rank_is_silent(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """One rank alone communicates nothing."""
    if run.world_size == 1:
        yield from (
            f"{name}: {len(p.collectives)} collectives"
            for name, p in rank.phases.items()
            if p.collectives
        )


def collectives_are_whole(run: RunRecord, rank: RankRun) -> Iterator[str]:
    """Each collective is of a known kind, has bytes, and has more than one rank but no more than
    there are."""
    for name, phase in rank.phases.items():
        for record in phase.collectives:
            if (
                record.op not in COLLECTIVES
                or record.nbytes <= 0
                or not 1 < record.group_size <= run.world_size
            ):
                yield (
                    f"{name}: {record.op} of {record.nbytes:,} B over {record.group_size} of "
                    f"{run.world_size} ranks"
                )


RUN_LAWS: dict[str, RunLaw] = {
    "one thing at a time": one_thing_at_a_time,
    "spans lie in the step": spans_lie_in_the_step,
    "peaks are the highest points": peaks_are_the_highest_points,
    "parts lie in their phase": parts_lie_in_their_phase,
    "sizes are possible": sizes_are_possible,
    "real ranks stand for themselves": real_ranks_stand_for_themselves,
    "numerics tell every step": numerics_tell_every_step,
    "one rank is silent": one_rank_is_silent,
    "collectives are whole": collectives_are_whole,
}
