"""Planner: the settings to train a model with, on how many GPUs, and why not the others.

The space says which candidates there are; bounds rule some out; the rest are planned and simulated.
What is left is an exact Pareto front of GPUs, bytes and time, from which the goal chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zsim.analysis.fit.fit import MUCH_FASTER, more_work, trouble
from zsim.analysis.planner.goal import GOALS, Goal
from zsim.analysis.planner.option import Option, dominates
from zsim.analysis.planner.search import searched
from zsim.analysis.planner.space import PlanCase, Refused, cases, space_of
from zsim.analysis.planner.table import Plan, Request
from zsim.errors import ArgumentError, ScenarioError
from zsim.io.arguments import choice_of, described
from zsim.io.units import counted
from zsim.runs import fault_support
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario_argument import require_scenario

NEEDED = {
    "days": ("tokens", "days say how long training on so many tokens may take"),
    "price": ("tokens", "a price is of the GPU hours of training on so many tokens"),
    "budget": ("price", "a budget is for the GPU hours of training, each at a price"),
}
"""Limits that say nothing without another one, and why."""


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
    links; ScenarioError for keys to vary that no candidate can have.
    """
    require_scenario(scenario)
    fault_support.require_none(scenario, purpose="a plan of training")
    request = _request(tokens=tokens, days=days, price=price, budget=budget, goal=goal)
    space = space_of(
        scenario, nodes=nodes, micro_batches=micro_batches, global_batch=global_batch, vary=vary,
        seek=goal == "smallest",
    )
    every = list(cases(scenario, space))
    refused = [each for each in every if isinstance(each, Refused)]
    able = [each for each in every if isinstance(each, PlanCase)]
    reasons = {each.reason.removeprefix("Scenario: ") for each in refused}
    if vary and not able and len(reasons) == 1:
        raise ScenarioError((f"vary: {reasons.pop()}",))
    options: list[Option] = []
    for each in searched(able, request):
        if isinstance(each, Refused):
            refused.append(each)
        else:
            options.append(each)
        say(f"{len(options) + len(refused):,} of {len(every):,} candidates")
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
    for where, (needed, remedy) in NEEDED.items():
        if limits[where] is not None and limits[needed] is None:
            raise ArgumentError(
                where=where, expected=f"{needed} as well", found="none", remedy=remedy
            )
    choice_of(goal, GOALS, where="goal")
    return Request(tokens=tokens, days=days, price=price, budget=budget, goal=goal)


def _taken(options: Sequence[Option], request: Request) -> Option | None:
    """The option that the goal chooses among those that fit and are in time.

    A TIGHT one is taken only if none fits, and of these one that releases no cache. Of two as fast,
    the first has fewer GPUs, or shards and recomputes less.
    """
    for verdict in ("FITS", "TIGHT"):
        able = [
            each for each in options
            if each.memory.verdict == verdict and not request.beyond(each)
        ]
        if able:
            least = min(trouble(each.memory) for each in able)
            able = [each for each in able if trouble(each.memory) == least]
            best = min(able, key=lambda each: _cost(each, request))
            return next(each for each in able if _as_good(each, best, request))
    return None


def _cost(option: Option, request: Request) -> tuple[int, int]:
    """Figures that the goal makes least: the first, then the second."""
    gpus, ns = option.gpus, option.step_time_ns
    return {"fastest": (ns, gpus), "cheapest": (gpus * ns, ns), "smallest": (gpus, ns)}[
        request.goal
    ]


def _as_good(option: Option, best: Option, request: Request) -> bool:
    """True for one about as fast on as many GPUs, or where the fastest is asked for, on fewer.

    2 % of the price is no reason to train twice as long.
    """
    few = option.gpus <= best.gpus if request.goal == "fastest" else option.gpus == best.gpus
    return few and option.step_time_ns <= MUCH_FASTER * best.step_time_ns


def _reason(
    option: Option, taken: Option | None, options: Sequence[Option], request: Request
) -> str:
    """The one reason against `option`; "" for the one to take."""
    if option is taken:
        return ""
    if beyond := request.beyond(option):
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
        hours = (1 + share) * option.gpus / taken.gpus - 1
        price = f", {hours:+.1%} GPU hours" if request.goal == "cheapest" else ""
        return f"{counted(option.gpus, 'GPU')}, {share:+.0%} time{price}"
    if abs(share) <= MUCH_FASTER - 1:
        same = _work(option.scenario) == _work(taken.scenario)
        return "as fast" if same else f"as fast, and {more_work(option.scenario)}"
    return f"{share:+.0%} time"


def _work(scenario: Scenario) -> tuple[Any, ...]:
    """Strategy, mesh and checkpointing, by which candidates shard and recompute."""
    return scenario.strategy, scenario.options, scenario.mesh, scenario.checkpointing
