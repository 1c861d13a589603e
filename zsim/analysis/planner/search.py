"""Search of a plan: each candidate is tried, unless what is known by then rules it out.

Those that are quickest at best come first. A candidate is first bounded without a Program, then
planned, then timed, and last its memory is replayed: each takes longer than the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

from zsim.analysis import assessed
from zsim.analysis.fit.fit import MUCH_FASTER
from zsim.analysis.planner.bounds import Bounds, bounds_of
from zsim.analysis.planner.option import Option
from zsim.analysis.planner.space import PlanCase, Refused
from zsim.analysis.planner.table import Request
from zsim.io.system.parallel import in_turn
from zsim.io.units import format_bytes, format_time
from zsim.memory.fits import device_capacity
from zsim.scenario.plan import planned

AHEAD = 4
"""Candidates that are tried at once. Each is held to options so many before it, so that a plan is
the same on any number of cores."""


class Rival(NamedTuple):
    """An option that fits, as others are held to it; `is_enough` in the days and the budget asked
    for."""

    name: str
    gpus: int
    nbytes: int
    ns: int
    is_enough: bool


def searched(able: Sequence[PlanCase], request: Request) -> Iterator[Option | Refused]:
    """The option that each case is, or the reason against it. Where the fewest GPUs are asked for,
    all cases of as many are tried before those of more."""
    smallest, search = request.goal == "smallest", _Search(able, request)
    order = sorted(
        ((able[number].gpus if smallest else 0, bounds_of(able[number].scenario), number)
         for number in range(len(able))),
        key=lambda each: (each[0], each[1].ns, each[1].nbytes, each[2]),
    )
    for _, group in groupby(order, key=lambda each: each[0]):
        yield from search.of((least, number) for _, least, number in group)


@dataclass(slots=True)
class _Search:
    """The cases, and the options among them so far."""

    able: Sequence[PlanCase]
    request: Request
    rivals: list[Rival] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def of(self, group: Iterable[tuple[Bounds, int]]) -> Iterator[Option | Refused]:
        """Try the cases with these bounds and numbers."""
        for tried in in_turn(partial(_tried, self.able), self._turns(group), ahead=AHEAD):
            if isinstance(tried, Option) and tried.memory.verdict == "FITS":
                self.rivals.append(Rival(
                    tried.name, tried.gpus, tried.memory.needed.nbytes, tried.step_time_ns,
                    not self.request.beyond(tried),
                ))
            yield tried
        yield from self.refused
        self.refused.clear()

    def _turns(self, group: Iterable[tuple[Bounds, int]]) -> Iterator[_Turn]:
        """The cases that no bound rules out, each when it is its turn."""
        for least, number in group:
            case = self.able[number]
            if reason := self._ruled_out(case, least):
                self.refused.append(Refused(case.name, reason))
            else:
                yield number, tuple(self.rivals)

    def _ruled_out(self, case: PlanCase, least: Bounds) -> str:
        """The reason for which `case` is neither on the front nor has room, by its bounds; or "".
        """
        request = self.request
        if request.days and (days := request.days_of(case.scenario, least.ns)) > request.days:
            return f"{days:,.1f} days by its kernels alone, where {request.days:g} are asked"
        there = device_capacity(case.scenario.cluster).high
        if least.nbytes > there:
            held = "states and activations" if least.kept else "states"
            return f"OOM: {held} alone are {format_bytes(least.nbytes)} of {format_bytes(there)}"
        if request.goal == "smallest":
            for rival in self.rivals:
                if rival.gpus < case.gpus and rival.is_enough:
                    return f"more GPUs than {rival.name}, which fits"
        reason = _no_better(case, least.nbytes, least.ns, self.rivals)
        return f"kernels alone take {reason}" if reason else ""


_Turn = tuple[int, tuple[Rival, ...]]
"""The number of a case, and the options by then."""


def _tried(able: Sequence[PlanCase], turn: _Turn) -> Option | Refused:
    """The option that a case is; or the reason against it, as soon as there is one."""
    number, rivals = turn
    case, scenario = able[number], able[number].scenario
    drafted = assessed.drafted_of_few(scenario) or assessed.drafted(planned(scenario))
    floor, there = drafted.floor, device_capacity(scenario.cluster)
    if reason := _no_better(case, floor.nbytes, floor.ns, rivals):
        return Refused(case.name, f"kernels alone take {reason}")
    if floor.low > there.high:
        return Refused(case.name, _without_room(floor.nbytes, there.nbytes))
    with_room = drafted.step_time()
    if with_room and (reason := _no_better(case, floor.nbytes, with_room.ns, rivals)):
        return Refused(case.name, f"takes {reason}")
    memory, step = drafted.figures(timed=False, step=with_room) or assessed.of_planned(
        planned(scenario), timed=False
    )
    if step is None:
        return Refused(case.name, _without_room(memory.needed.nbytes, memory.capacity.nbytes))
    return Option(
        name=case.name, way=case.way, scenario=scenario, memory=memory,
        step_time_ns=step.ns, step_time_band_ns=step.band_ns, dropped=case.dropped,
        instead=case.instead,
    )


def _without_room(needed: int, there: int) -> str:
    return f"OOM: {format_bytes(needed)} of {format_bytes(there)}"


def _no_better(case: PlanCase, nbytes: int, ns: int, rivals: Sequence[Rival]) -> str:
    """The reason for which `case` is on no front and as good as none, as it needs so much at least;
    or ""."""
    better = next((
        rival for rival in rivals
        if rival.gpus <= case.gpus and rival.nbytes <= nbytes and MUCH_FASTER * rival.ns < ns
    ), None)
    return "" if better is None else f"{format_time(ns)}, and {better.name} less in all"
