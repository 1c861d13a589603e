"""The smallest change that would hide exposed communication: each candidate simulated again, with
its costs and gains.

Candidates gather earlier, or have other units, a larger micro-batch or faster links. Each moves the
dependencies of others, so nothing short of a simulation tells its effect. Each is a scenario of its
own, refused, planned and simulated like any other. Times are per token, so that a larger batch does
not look like a slower step. Proposed changes have a memory verdict too.

Communication exposed at the ends, before the first op of forward and after the last of a backward,
has no compute beside it. No lookahead and no micro-batch hides it, so it does not count against
them. Other units and faster links shorten it, and are tried for that where nothing else is left. A
change that does not shorten the ends is then not proposed, whatever else it gains.

The breakeven micro-batch is the smallest that hides the rest, to a sequence: doubled until it does,
then bisected. The bisection assumes that the exposed share falls as the batch grows; the breakeven
and the size below it are both simulated. Where it does not fit the device, or none hides, the
largest multiple that fits is proposed too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zsim.analysis.causes.critical_path import explain
from zsim.analysis.hiding.candidates import (
    APART,
    BATCH,
    BATCHES,
    ENDS,
    KINDS,
    UNITS,
    batch_sizes,
    with_batch,
)
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import Timeline
from zsim.io.units import format_bytes
from zsim.memory.fits import FitsVerdict, assess
from zsim.memory.full_device import filled
from zsim.models import wrapping
from zsim.scenario.checks import refusals
from zsim.scenario.checks.work_limits import MANY_TIMES
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario

HIDDEN = 0.01
"""Communication counts as hidden when less than this share of the step is exposed, besides the
step's ends."""
NOTHING = 0.005
"""A gain of less is none, and a kind of change that gains nothing is not proposed."""
SHORTER = 0.001
"""The ends are shorter when their share is less by this, the last digit that a report shows of it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change in the scenario's terms, and its effect: nanoseconds per token of one rank, and the
    exposed share of the step.

    `at_ends`: the part of `exposed` at the step's ends, which no compute can hide. `memory`: the
    verdict with `needed_bytes`; only proposed changes have them. `released`: the expected cache
    releases of a step that runs only with them.
    """

    label: str
    ns_per_token: float
    exposed: float
    at_ends: float = 0.0
    memory: FitsVerdict | None = None
    needed_bytes: int = 0
    capacity_bytes: int = 0
    released: str = ""

    @property
    def hides(self) -> bool:
        """True where less than `HIDDEN` of the step is exposed between its ends."""
        return self.inside < HIDDEN

    @property
    def hides_all(self) -> bool:
        """True where less than `HIDDEN` of the step is exposed, its ends included."""
        return self.exposed < HIDDEN

    @property
    def inside(self) -> float:
        """The exposed share between the step's ends."""
        return max(0.0, self.exposed - self.at_ends)

    def gains(self, now: Change) -> bool:
        """True where the time per token is less than `now` by at least `NOTHING`."""
        return self.ns_per_token <= now.ns_per_token * (1 - NOTHING)

    @property
    def memory_words(self) -> str:
        """Text on its memory; "" where it fits."""
        needs = f"needs {format_bytes(self.needed_bytes)} of {format_bytes(self.capacity_bytes)}"
        if self.memory == "TIGHT" and self.released:
            return f"runs only {self.released}: {needs} to keep all that it caches"
        return {"OOM": f"does not fit: {needs}", "TIGHT": f"may not fit: {needs}"}.get(
            self.memory or "", ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """The scenario as it is, and the smallest change of each kind that hides the communication, or
    the best where none does.

    `useless`: kinds of change of which no candidate gains anything, or shortens the ends where only
    those are left.
    """

    now: Change
    changes: tuple[Change, ...]
    useless: tuple[str, ...] = ()
    untried: str = ""
    """The reason why no change was tried, where simulating that often would take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A candidate that was simulated."""

    change: Change
    planned: Planned

    @property
    def scenario(self) -> Scenario:
        """The candidate itself."""
        return self.planned.scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Aim of a change to the scenario as it is (`now`): hide its communication, with `ends` that at
    the step's ends too."""

    now: Change
    ends: bool

    def is_met(self, change: Change) -> bool:
        """True where it leaves nothing to hide."""
        return change.hides_all if self.ends else change.hides

    def helps(self, change: Change) -> bool:
        """True where the step is shorter by it; and its ends, where only those are left."""
        shorter = not self.now.hides or change.at_ends <= self.now.at_ends - SHORTER
        return shorter and change.gains(self.now)


def hiding(case: Planned, timeline: Timeline | None = None) -> Hiding:
    """Changes that hide the scenario's communication, or shorten it at the ends of the step if
    nothing else is left; none where all is hidden.

    `timeline`: the step's, where the caller has it.
    """
    now, scenario = _simulated("as it is", case, timeline).change, case.scenario
    untried = "" if now.hides_all else scenario.work.problem(part=MANY_TIMES)
    if now.hides_all or untried:
        return Hiding(now=now, changes=(), untried=untried)
    proposed: list[Change] = []
    useless: list[str] = []
    for kind in ENDS if now.hides else KINDS:
        # units move what is exposed to the ends
        aim = Aim(now=now, ends=now.hides or kind in (UNITS, APART))
        tried = _batches(scenario, aim) if kind == BATCH else _smallest(KINDS[kind](scenario), aim)
        if any(aim.helps(candidate.change) for candidate in tried):
            proposed += [_with_memory(candidate).change for candidate in tried]
        elif tried:
            useless.append(kind)
    return Hiding(now=now, changes=tuple(proposed), useless=tuple(useless))


def _batches(scenario: Scenario, aim: Aim) -> list[Tried]:
    """The breakeven micro-batch, and where it is too large, or there is none, the largest multiple
    that fits and gains something."""
    tried = [_with_memory(candidate) for candidate in _breakeven(scenario, aim)]
    if not tried or (tried[0].change.hides and tried[0].change.memory != "OOM"):
        return tried
    size, most = scenario.batch.micro_batch, tried[0].scenario.batch.micro_batch
    for times in reversed(BATCHES):
        smaller = _tried(*with_batch(scenario, size * times)) if size * times < most else None
        if smaller is not None and aim.helps(smaller.change):
            fitting = _with_memory(smaller)
            if fitting.change.memory != "OOM":
                return [fitting, *tried]
    return tried


def _simulated(label: str, case: Planned, timeline: Timeline | None = None) -> Tried:
    scenario, program = case.scenario, case.program if timeline else filled(case).program
    timeline = timeline or simulate_step(
        program, costs=Costs(cluster=scenario.cluster, execution=scenario.executed)
    )
    batch = scenario.batch
    tokens = batch.micro_batch * batch.sequence_length * batch.accumulation * batch.forwards
    why, step_ns = explain(program, timeline), max(1, timeline.step_time_ns)
    change = Change(
        label=label, ns_per_token=step_ns / tokens, exposed=why.exposed_ns / step_ns,
        at_ends=why.at_ends_ns / step_ns,
    )
    return Tried(change=change, planned=case)


def _tried(label: str, scenario: Scenario) -> Tried | None:
    """The candidate simulated; None where a scenario file that asked for it would be refused."""
    if refusals.problems(scenario):
        return None
    return _simulated(label, planned(scenario))


def _with_memory(tried: Tried) -> Tried:
    """The change with its memory verdict, which is computed once."""
    if tried.change.memory:
        return tried
    verdict = assess(tried.planned)
    expected = verdict.pressure.expected if verdict.pressure else None
    change = replace(
        tried.change,
        memory=verdict.verdict,
        needed_bytes=verdict.needed.nbytes,
        capacity_bytes=verdict.capacity.nbytes,
        released=expected.sentence if expected else "",
    )
    return replace(tried, change=change)


def _smallest(candidates: Iterable[tuple[str, Scenario]], aim: Aim) -> list[Tried]:
    """The first candidate that hides and gains, alone, else the first of those with the largest
    gain; where none gains, the nearest one. Empty where none can be tried."""
    attempts: list[Tried] = []
    for label, scenario in candidates:
        tried = _tried(label, scenario)
        if tried is not None:
            attempts.append(tried)
            if aim.is_met(tried.change) and aim.helps(tried.change):
                return [tried]
    return as_good_as_any([tried for tried in attempts if aim.helps(tried.change)] or attempts)


def as_good_as_any(attempts: list[Tried]) -> list[Tried]:
    """The first that takes no longer than any worth speaking of, alone."""
    best = min((tried.change.ns_per_token for tried in attempts), default=0.0)
    return [tried for tried in attempts if tried.change.ns_per_token <= best * (1 + NOTHING)][:1]


def _breakeven(scenario: Scenario, aim: Aim) -> list[Tried]:
    """The smallest micro-batch that hides, or the best of its multiples."""
    if scenario.model.family == wrapping.TRACED:
        return []
    now = scenario.batch.micro_batch
    multiples = _smallest(batch_sizes(scenario), aim)
    if not multiples or not multiples[0].change.hides:
        return multiples
    smallest = multiples[0]
    high = smallest.scenario.batch.micro_batch
    low = max(size for size in (now, *(now * times for times in BATCHES)) if size < high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _tried(*with_batch(scenario, middle))
        if tried is not None and tried.change.hides:
            smallest, high = tried, middle
        else:
            low = middle
    return [smallest]
