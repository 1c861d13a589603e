"""Planner: the settings to train a model with, on how many GPUs, and why not the others.

The space says which candidates there are; bounds rule some out; the rest are planned and simulated.
What is left is an exact Pareto front of GPUs, bytes and time, from which the goal chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

from zsim.analysis.fit import assessed
from zsim.analysis.fit.fit import MUCH_FASTER
from zsim.analysis.planner.bounds import Bounds, bounds_of
from zsim.analysis.planner.option import Option, dominates
from zsim.analysis.planner.space import UP_TO, PlanCase, Refused, cases, space_of
from zsim.analysis.planner.table import Plan, Request
from zsim.errors import ArgumentError, shown
from zsim.io.arguments import described
from zsim.io.system.parallel import mapped
from zsim.io.units import format_bytes, format_time
from zsim.memory.fits import device_capacity
from zsim.runs import fault_support
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario

__all__ = ["Option", "Plan", "plan_for"]

Goal = Literal["fastest", "cheapest", "smallest"]
GOALS: tuple[Goal, ...] = ("fastest", "cheapest", "smallest")
AT_ONCE = 8
"""Candidates that are simulated between two looks at what they rule out."""


def plan_for(
    scenario: Scenario, *, nodes: Sequence[int] = (), micro_batches: Sequence[int] = (),
    global_batch: int | None = None, tokens: float | None = None, days: float | None = None,
    price: float | None = None, budget: float | None = None, goal: Goal = "fastest",
    vary: Mapping[str, Sequence[Any]] | None = None, say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The way to train `scenario`'s model, with every other way and one reason against each.

    `nodes`, `micro_batches`: sizes to try; `global_batch`: sequences of a step, which accumulation
    fills; `vary`: lists of values of any other keys, as {"wrapping.every": [1, 2]}. `tokens` to
    train on within `days` leave out what is slower; `price` is of one GPU for an hour, and what
    costs more than the `budget` is left out. `goal`: "fastest", "cheapest" (GPU hours) or
    "smallest" (GPUs). ArgumentError for sizes and goals that are none, and for faults but slow
    links.
    """
    fault_support.require_none(scenario, purpose="a plan of training")
    request = _request(tokens=tokens, days=days, price=price, budget=budget, goal=goal)
    space = space_of(
        scenario, nodes=UP_TO if goal == "smallest" and not nodes else nodes,
        micro_batches=micro_batches, global_batch=global_batch, vary=vary,
    )
    told = list(cases(scenario, space))
    refused = [each for each in told if isinstance(each, Refused)]
    able = [each for each in told if isinstance(each, PlanCase)]
    options, each_s = list[Option](), 0.0
    for batch in _batches(able, options, refused, request):
        say(f"{len(options) + len(refused):,} of {len(told):,} candidates")
        begun = perf_counter()
        tried = mapped(partial(_tried, options=tuple(options)), batch, each_s=each_s)
        each_s = (perf_counter() - begun) / len(batch)
        refused += [each for each in tried if isinstance(each, Refused)]
        options += [each for each in tried if isinstance(each, Option)]
    order = {case.name: number for number, case in enumerate(able)}
    options.sort(key=lambda option: order[option.name])
    taken = _taken(options, request)
    return Plan(
        scenario=scenario, request=request, space=space, recommended=taken,
        options=tuple(
            each if each is taken else replace(each, reason=_reason(each, taken, options, request))
            for each in options
        ),
        refused=tuple((each.name, each.reason) for each in refused),
    )


def _request(
    *, tokens: float | None, days: float | None, price: float | None, budget: float | None,
    goal: str,
) -> Request:
    limits = {"tokens": tokens, "days": days, "price": price, "budget": budget}
    for where, value in limits.items():
        if value is not None and not (isinstance(value, int | float) and 0 < value < 1e30):
            raise ArgumentError(
                where=where, expected="a number above 0", found=described(value)
            )
    if days is not None and tokens is None:
        raise ArgumentError(
            where="days", expected="tokens as well", found="none",
            remedy="days say how long training on so many tokens may take",
        )
    if budget is not None and (tokens is None or price is None):
        raise ArgumentError(
            where="budget", expected="tokens and price as well",
            found="no tokens" if tokens is None else "no price",
            remedy="a budget is for GPU hours of training on so many tokens",
        )
    if goal not in GOALS:
        raise ArgumentError(where="goal", expected=" or ".join(GOALS), found=shown(goal))
    return Request(tokens=tokens, days=days, price=price, budget=budget, goal=goal)


def _batches(
    able: Sequence[PlanCase], options: Sequence[Option], refused: list[Refused], request: Request
) -> Iterator[list[PlanCase]]:
    """Cases that no bound rules out, those that are quickest at best first, or smallest where the
    fewest GPUs are asked for. What is ruled out goes to `refused`."""
    smallest = request.goal == "smallest"
    waiting = sorted(
        ((bounds_of(case.scenario), number, case) for number, case in enumerate(able)),
        key=lambda each: (each[2].gpus if smallest else 0, each[0].ns, each[0].nbytes, each[1]),
    )
    while waiting:
        batch: list[PlanCase] = []
        rest = []
        for entry in waiting:
            least, _, case = entry
            if reason := _ruled_out(case, least, options, request):
                refused.append(Refused(case.name, reason))
            elif len(batch) < AT_ONCE and not (smallest and batch and batch[0].gpus < case.gpus):
                batch.append(case)
            else:
                rest.append(entry)
        waiting = rest
        if batch:
            yield batch


def _tried(case: PlanCase, *, options: Sequence[Option]) -> Option | Refused:
    """The option that `case` is; or the reason against it, once it is planned, without its figures.
    """
    scenario = case.scenario
    few = assessed.drafted_of_few(scenario)
    drafted = few or assessed.drafted(planned(scenario))
    floor = drafted.floor
    if reason := _no_better(case, floor.nbytes, floor.ns, options):
        return Refused(case.name, f"kernels alone take {reason}")
    there = device_capacity(scenario.cluster)
    if floor.low > there.high:
        return Refused(case.name, _without_room(floor.nbytes, there.nbytes))
    with_room = drafted.step_time()
    if with_room and (reason := _no_better(case, floor.nbytes, with_room.ns, options)):
        return Refused(case.name, f"takes {reason}")
    memory, step = drafted.figures(timed=False, step=with_room) or assessed.of_planned(
        planned(scenario), timed=False
    )
    if step is None:
        return Refused(case.name, _without_room(memory.needed.nbytes, memory.capacity.nbytes))
    return Option(
        name=case.name, way=case.way, scenario=scenario, memory=memory,
        step_time_ns=step.ns, step_time_band_ns=step.band_ns,
    )


def _without_room(needed: int, there: int) -> str:
    return f"OOM: {format_bytes(needed)} of {format_bytes(there)}"


def _ruled_out(
    case: PlanCase, least: Bounds, options: Sequence[Option], request: Request
) -> str:
    """The reason for which `case` is neither on the front nor has room, by its bounds; or ""."""
    if request.days and (days := request.days_of(case.scenario, least.ns)) > request.days:
        return f"{days:,.1f} days by its kernels alone, where {request.days:g} are asked"
    there = device_capacity(case.scenario.cluster).high
    if least.nbytes > there:
        held = "states and activations" if least.kept else "states"
        return f"OOM: {held} alone are {format_bytes(least.nbytes)} of {format_bytes(there)}"
    if request.goal == "smallest":
        for option in options:
            if (
                option.gpus < case.gpus and option.memory.verdict == "FITS"
                and not _beyond(option, request)
            ):
                return f"more GPUs than {option.name}, which fits"
    reason = _no_better(case, least.nbytes, least.ns, options)
    return f"kernels alone take {reason}" if reason else ""


def _no_better(case: PlanCase, nbytes: int, ns: int, options: Sequence[Option]) -> str:
    """The reason for which `case` is on no front and as good as none, as it needs so much at least;
    or ""."""
    better = next((
        option for option in options
        if option.memory.verdict == "FITS" and option.gpus <= case.gpus
        and option.memory.needed.nbytes <= nbytes and MUCH_FASTER * option.step_time_ns < ns
    ), None)
    return "" if better is None else f"{format_time(ns)}, and {better.name} less in all"


def _taken(options: Sequence[Option], request: Request) -> Option | None:
    """The option that the goal chooses among those that fit and are in time; a TIGHT one only where
    none fits. Of two that are as good the one that comes first shards and recomputes less."""
    for verdict in ("FITS", "TIGHT"):
        able = [
            each for each in options
            if each.memory.verdict == verdict and not _beyond(each, request)
        ]
        if able:
            least = min(_cost(each, request) for each in able)
            near = [each for each in able if _as_good(each, least, request)]
            return near[0]
    return None


def _cost(option: Option, request: Request) -> tuple[float, float]:
    """Figures that the goal makes least: the first, then the second."""
    ns = float(option.step_time_ns)
    if request.goal == "fastest":
        return ns, option.gpus
    return (option.gpus * ns, ns) if request.goal == "cheapest" else (option.gpus, ns)


def _as_good(option: Option, least: tuple[float, float], request: Request) -> bool:
    first, second = _cost(option, request)
    if request.goal == "smallest":
        return first == least[0] and second <= MUCH_FASTER * least[1]
    as_little = second <= MUCH_FASTER * least[1]
    return first <= MUCH_FASTER * least[0] and (first > least[0] or as_little)


def _beyond(option: Option, request: Request) -> str:
    """The reason against an option that takes more days or money than there are; or ""."""
    if request.tokens and request.days:
        days = option.days(request.tokens)[0]
        if days > request.days:
            return f"{days:,.1f} days, where {request.days:g} are asked"
    if request.tokens and request.price and request.budget:
        cost = option.gpu_hours(request.tokens) * request.price
        if cost > request.budget:
            return f"costs {cost:,.0f}, where {request.budget:,.0f} are asked"
    return ""


def _reason(
    option: Option, taken: Option | None, options: Sequence[Option], request: Request
) -> str:
    """The one reason against `option`; "" for the one to take."""
    if option is taken:
        return ""
    if beyond := _beyond(option, request):
        return beyond
    if option.memory.verdict == "TIGHT":
        return "TIGHT: it may not have room"
    better = next((each for each in options if dominates(each, option)), None)
    if better is not None:
        return f"no better than {better.name} in GPUs, memory or time"
    if taken is None:
        return ""
    share = option.step_time_ns / taken.step_time_ns - 1
    if option.gpus != taken.gpus:
        return f"{option.gpus:,} GPUs, {share:+.0%} time"
    if abs(share) <= MUCH_FASTER - 1:
        return "as fast, and shards or recomputes more"
    return f"{share:+.0%} time"
