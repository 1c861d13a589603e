"""Advice: the effect of each change that a user could make, planned and simulated again; nothing
is recited.

A change that saves nothing says where the peak is instead. Where no single change makes a scenario
fit, several are tried together. It reads the effects of zsim.analysis.alternatives off Programs and
Runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from zsim.analysis import assessed
from zsim.analysis.alternatives import changes, dropped
from zsim.io.system.parallel import mapped
from zsim.io.units import format_bytes
from zsim.ir.program import Program
from zsim.memory.fits import FitsVerdict, MemoryVerdict, assess
from zsim.memory.full_device import with_calls
from zsim.runs.figures.step_time import StepTime, step_time
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.plan import Planned
from zsim.scenario.scenario import Scenario

MOST_TOGETHER = 4
"""The most changes that are tried together."""
BREADTH = 4
"""Number of ways that do not fit, those that need least, to change further; all pairs are tried."""
MOST_SHOWN = 3
"""The most ways of several changes that are told of, the fastest ones."""
REMEDY = "take more ranks, a smaller micro-batch or shorter sequences"
"""Advice for a scenario of which no tried change fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Effect of one change: bytes saved of those needed, nanoseconds added to the step (both may be
    negative), and the step time with its band.

    `saved_allocated_bytes`: the peak of allocated bytes falls by these, though the same segments
    may still be reserved. `saved_by_part`: bytes by which the peak of each part of the step falls;
    they help only in the part with the overall peak. `dropped`: options of the scenario that the
    change does without. `releases_per_step` and `running` are those of MemoryVerdict.
    """

    change: str
    saved_bytes: int
    saved_allocated_bytes: int
    added_ns: int
    step_time_ns: int
    step_time_band_ns: tuple[int, int]
    needed_bytes: int
    verdict: FitsVerdict
    peak_at: str
    saved_by_part: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    releases_per_step: int | None = 0
    running: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A scenario after some changes: the memory it needs, and its step time where that is asked
    for.

    `program` is kept of the scenario as it is; those of all its changes would be too large.
    """

    changes: tuple[str, ...]
    scenario: Scenario
    memory: MemoryVerdict
    step: StepTime | None = None
    program: Program | None = None

    @property
    def name(self) -> str:
        """The changes in words, the last strategy alone of several: "strategy zero2 + fused
        optimizer"."""
        strategies = [change for change in self.changes if change.startswith("strategy ")]
        labels = [change for change in self.changes if change not in strategies[:-1]]
        return " + ".join(
            change if times == 1 else f"{times} times {change}"
            for change, times in Counter(labels).items()
        )


def advice(before: Way) -> tuple[Effect, ...]:
    """Effects of every change that the scenario `before` allows, largest saving first; combinations
    of changes where no single one is enough."""
    singles = changed(before)
    several: tuple[Way, ...] = ()
    if all(way.memory.verdict != "FITS" for way in (before, *singles)):
        several = together(singles)
    effects = [_effect(way, before) for way in (*singles, *several)]
    alone, joint = effects[: len(singles)], effects[len(singles) :]
    fastest = sorted(joint, key=lambda effect: effect.added_ns)[:MOST_SHOWN]
    return tuple(sorted([*alone, *fastest], key=lambda effect: -effect.saved_bytes))


def none_fits(before: MemoryVerdict, effects: Sequence[Effect]) -> str:
    """Sentence that the scenario fits under no change, with the least that it needs; "" where it or
    a change may fit."""
    if any(
        verdict != "OOM" for verdict in (before.verdict, *(effect.verdict for effect in effects))
    ):
        return ""
    least, peak_at, change = before.needed.nbytes, before.peak_at, "as it is it"
    for effect in effects:
        if effect.needed_bytes < least:
            least, peak_at, change = effect.needed_bytes, effect.peak_at, effect.change
    needed = f"{format_bytes(least)} of {format_bytes(before.capacity.nbytes)} (peak in {peak_at})"
    needed += f"; {before.host}" if before.host_is_short else ""
    joined = (
        f", and of several together, up to {MOST_TOGETHER}, none that was tried FITS"
        if len(effects) > 1
        else ""
    )
    return (
        f"nothing fits: even {change} needs {needed}{joined}; {REMEDY}, or let zsim fit try other "
        f"strategies"
    )


def way_of(changes: tuple[str, ...], case: Planned, *, timed: bool = True) -> Way:
    """A planned scenario assessed, and simulated where `timed` or where it has room."""
    verdict, step = assessed.of_planned(case, timed=timed)
    return Way(
        changes=changes, scenario=case.scenario, memory=verdict, step=step, program=case.program
    )


def ways_of(
    cases: Sequence[tuple[tuple[str, ...], Scenario]], *, timed: bool = True,
    before: Way | None = None, say: Callable[[int], None] | None = None,
) -> list[Way]:
    """Scenarios planned and assessed as `way_of` does, on all cores; `before`: a way with the
    Program of some, or none. `say` is told how many are done."""
    figures = mapped(
        partial(_figures, timed=timed, before=before), [scenario for _, scenario in cases],
        at_once=before is not None, say=say,
    )
    return [
        Way(changes=changes, scenario=scenario, memory=memory, step=step)
        for (changes, scenario), (memory, step) in zip(cases, figures, strict=True)
    ]


def _figures(
    scenario: Scenario, *, timed: bool, before: Way | None
) -> tuple[MemoryVerdict, StepTime | None]:
    if before is not None and before.program is not None and scenario == (
        derived(before.scenario, expandable_segments=scenario.expandable_segments)
    ):  # the allocator changes nothing but memory that is given back
        verdict = assess(case := Planned(scenario, before.program))
        same = verdict.driver_calls == before.memory.driver_calls
        return verdict, before.step if same else step_time(with_calls(case, verdict))
    return assessed.figures(scenario, timed=timed)


def _effect(way: Way, start: Way) -> Effect:
    before, took, took_before = start.memory, way.step, start.step
    assert took is not None
    assert took_before is not None
    return Effect(
        change=way.name, saved_bytes=before.needed.nbytes - way.memory.needed.nbytes,
        saved_allocated_bytes=before.allocated_bytes - way.memory.allocated_bytes,
        added_ns=took.ns - took_before.ns, step_time_ns=took.ns, step_time_band_ns=took.band_ns,
        needed_bytes=way.memory.needed.nbytes, verdict=way.memory.verdict,
        peak_at=way.memory.peak_at,
        saved_by_part={
            part: saved
            for part, most in before.by_part.items()
            if (saved := most - way.memory.by_part.get(part, 0)) > 0
        },
        dropped=dropped(start.scenario, way.scenario),
        releases_per_step=way.memory.releases_per_step, running=way.memory.running,
    )


def changed(
    way: Way, *, known: set[tuple[object, ...]] | None = None, stages: bool = True,
    timed: bool = True,
) -> tuple[Way, ...]:
    """`way` with each single change more that is not refused; without `stages` its strategy stays.

    What has been `known` is left out, and what is found is added to it. Unless `timed`, what has no
    room is not simulated.
    """
    cases: list[tuple[tuple[str, ...], Scenario]] = []
    known = set() if known is None else known
    for change, other in changes(way.scenario):
        key = _key(other)
        if (
            key in known
            or refusals.problems(other)
            or (other.strategy != way.scenario.strategy and not stages)
        ):
            continue
        known.add(key)
        cases.append(((*way.changes, change), other))
    return tuple(ways_of(cases, timed=timed, before=way))


def together(starts: Sequence[Way], *, stages: bool = True) -> tuple[Way, ...]:
    """Ways from `starts` with as few changes more as make some of them fit.

    Where MOST_TOGETHER are not enough, the first TIGHT ones, if none of `starts` is as good.
    """
    frontier, known = list(starts), {_key(way.scenario) for way in starts}
    tight: tuple[Way, ...] | None = () if _having("TIGHT", starts) else None
    for _ in range(MOST_TOGETHER - 1):
        further = [
            other
            for way in frontier
            for other in changed(way, known=known, stages=stages, timed=False)
        ]
        if fitting := _having("FITS", further):
            return fitting
        tight = _having("TIGHT", further) or None if tight is None else tight
        frontier = sorted(further, key=lambda way: way.memory.needed.nbytes)[:BREADTH]
    return tight or ()


def _having(verdict: FitsVerdict, ways: Sequence[Way]) -> tuple[Way, ...]:
    return tuple(way for way in ways if way.memory.verdict == verdict)


def _key(scenario: Scenario) -> tuple[object, ...]:
    """The parts of a scenario that changes replace."""
    mine = scenario
    return (
        mine.strategy, mine.options, mine.mesh, mine.checkpointing, mine.batch, mine.wrapping,
        mine.optimizer, mine.expandable_segments, mine.offload,
    )
