"""Plan: the candidates, the one to take and the reason against each other one. It is data, the
table of `zsim plan`, and JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zsim.analysis.fit.fit_table import SURER, otherwise
from zsim.analysis.planner.option import DAY_S, Option, dominates
from zsim.analysis.planner.space import Space
from zsim.io.notebook.data_frame import data_frame
from zsim.io.notebook.html_table import html_table
from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs.figures import metrics
from zsim.scenario.scenario import Scenario

MOST_LINES = 12
"""Options of the front that the table has; the fastest of more."""
MOST_REASONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Tokens to train on, the days and the money that they may take, the price of a GPU hour, and
    the goal."""

    tokens: float | None
    days: float | None
    price: float | None
    budget: float | None
    goal: str

    def days_of(self, scenario: Scenario, step_ns: int) -> float:
        """Days for the tokens by steps of `step_ns`; 0 where no tokens are named."""
        trained = metrics.tokens(scenario) * scenario.world_size
        return (self.tokens or 0.0) / trained * step_ns / 1e9 / DAY_S

    def beyond(self, option: Option) -> str:
        """The reason against an option that takes more days or money than there are; or ""."""
        if self.tokens and self.days:
            days = option.days(self.tokens)[0]
            if days > self.days:
                return f"{days:,.1f} days, where {self.days:g} are asked"
        if self.tokens and self.price and self.budget:
            cost = option.gpu_hours(self.tokens) * self.price
            if cost > self.budget:
                return f"costs {cost:,.0f}, where {self.budget:,.0f} are asked"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """All candidates that were simulated as `options`, those that were not as `refused` with the
    reason, and the one to take (None where none fits)."""

    scenario: Scenario
    request: Request
    space: Space
    options: tuple[Option, ...]
    recommended: Option | None
    refused: tuple[tuple[str, str], ...]

    @property
    def front(self) -> tuple[Option, ...]:
        """The options that fit, in the days and the budget asked for, and that no other one beats
        in GPUs, memory and time together."""
        able = [
            each for each in self.options
            if each.memory.verdict == "FITS" and not each.reason.endswith(" are asked")
        ]
        return tuple(
            each for each in able if not any(dominates(other, each) for other in able)
        )

    @property
    def reasons(self) -> tuple[tuple[str, str], ...]:
        """Every candidate but the one to take, with the reason against it."""
        others = (option for option in self.options if option is not self.recommended)
        return (*((option.name, option.reason) for option in others), *self.refused)

    @property
    def alike(self) -> tuple[Option, ...]:
        """Other options on as many GPUs that fit, whose band has the recommended one's time."""
        taken = self.recommended
        return () if taken is None else tuple(
            each for each in self.options
            if each is not taken and each.memory.verdict == "FITS" and each.gpus == taken.gpus
            and each.step_time_band_ns[0] <= taken.step_time_ns <= each.step_time_band_ns[1]
        )

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim plan --json` prints; its keys are stable."""
        front = {each.name for each in self.front}
        return {
            "schema_version": SCHEMA_VERSION, "scenario": self.scenario.name,
            "request": asdict(self.request), "space": asdict(self.space),
            "recommended": self.recommended.name if self.recommended else None,
            "options": [
                {**each.to_dict(), "on_front": each.name in front} for each in self.options
            ],
            "refused": [{"name": name, "reason": reason} for name, reason in self.refused],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, default=str)

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each option that was simulated; ZsimError without pandas."""
        front = {each.name for each in self.front}
        return data_frame(
            [
                (each.name, each.gpus, each.scenario.batch.micro_batch, each.way,
                 each.memory.verdict, each.memory.needed.nbytes, each.step_time_ns,
                 each.tokens_per_s, each.name in front, each.reason)
                for each in self.options
            ],
            ("name", "gpus", "micro_batch", "way", "verdict", "needed_bytes", "step_time_ns",
             "tokens_per_s", "on_front", "reason"),
        )

    def _repr_html_(self) -> str:
        """The front as a table, for notebooks; an arrow marks the option to take."""
        return html_table(
            repr(self)[1:-1],
            ("", "GPUs", "micro-batch", "way", "needs", "step", "tokens/s", "reason"),
            [("→" if each is self.recommended else "", f"{each.gpus:,}",
              each.scenario.batch.micro_batch, each.way, format_bytes(each.memory.needed.nbytes),
              each.step_time, f"{each.tokens_per_s:,.0f}", each.reason)
             for each in _shown(self, self.front)],
        )

    def __str__(self) -> str:
        """The table of `zsim plan`."""
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        chosen = f"take {self.recommended.name}" if self.recommended else "nothing fits"
        return f"<Plan of {len(self.options) + len(self.refused)} candidates: {chosen}>"


def _lines(plan: Plan) -> Iterator[str]:
    request, space, batch = plan.request, plan.space, plan.scenario.batch
    own = batch.micro_batch * batch.accumulation * plan.scenario.world_size
    other = f", where the scenario has {own:,}; --global-batch sets them"
    yield (
        f"{plan.scenario.name}: {request.goal} way to train {plan.scenario.model.name}, "
        f"{counted(space.global_batch, 'sequence')} a step"
        f"{'' if space.global_batch == own or space.is_fixed else other}"
    )
    yield "   tensor and pipeline parallelism (tp, pp) are not varied: no strategy has them yet"
    front, days = plan.front, f" {'days':>7}" if request.tokens else ""
    cost = f" {'cost':>10}" if request.price else ""
    shown = _shown(plan, front)
    yield f"   {'GPUs':>6} {'mb':>3} {'':5} {'needs':>10} {'step':>10} {'tokens/s':>10}{days}{cost}"
    for each in shown:
        yield f"{'->' if each is plan.recommended else '  '} {_cells(each, plan)}  {each.way}"
        reason = each.reason if each is not plan.recommended else ""
        remarks = (reason, each.memory.running, otherwise(each.instead, each.dropped))
        if any(remarks):
            yield f"{'':{len(_cells(each, plan)) + 5}}{'; '.join(filter(None, remarks))}"
    names = {each.name for each in front}
    hidden = len(front) - len([each for each in shown if each.name in names])
    if hidden > 0:
        yield f"   and {hidden} more on the front of GPUs, memory and time; --json has all"
    yield from _rest(plan, shown)
    yield from _verdict(plan)


def _shown(plan: Plan, front: tuple[Option, ...]) -> list[Option]:
    """The fastest of `front`, and the recommended one, in the order of the candidates."""
    fastest = sorted(front, key=lambda each: each.step_time_ns)[:MOST_LINES]
    chosen = {each.name for each in fastest}
    if plan.recommended is not None:
        chosen.add(plan.recommended.name)
    return [each for each in plan.options if each.name in chosen]


def _cells(each: Option, plan: Plan) -> str:
    tokens, price = plan.request.tokens, plan.request.price
    days = f" {each.days(tokens)[0]:>7,.1f}" if tokens else ""
    cost = f" {each.gpu_hours(tokens) * price:>10,.0f}" if tokens and price else ""
    return (
        f"{each.gpus:>6,} {each.scenario.batch.micro_batch:>3} {each.memory.verdict:5} "
        f"{format_bytes(each.memory.needed.nbytes):>10} {format_time(each.step_time_ns):>10} "
        f"{each.tokens_per_s:>10,.0f}{days}{cost}"
    )


def _rest(plan: Plan, shown: list[Option]) -> Iterator[str]:
    """The numbers of other candidates, by what speaks against them."""
    names = {each.name for each in shown}
    reasons = Counter(
        [_kind(each.reason) for each in plan.options if each.name not in names]
        + [_kind(reason) for _, reason in plan.refused]
    )
    for reason, number in reasons.most_common(MOST_REASONS):
        yield f"   {number:>4} {reason}"


def _kind(reason: str) -> str:
    """The reason without its figures and names."""
    heads = {
        "OOM: states": "OOM by states and activations alone", "OOM": "OOM",
        "no better": "no better than another in GPUs, memory or time", "TIGHT": "TIGHT",
        "more GPUs than": "need more GPUs than what fits",
        "kernels alone": "slower by kernels alone than another is",
        "takes": "slower than another that needs no more",
    }
    head = next((text for begin, text in heads.items() if reason.startswith(begin)), "")
    if head or "sequences are no multiple" in reason:
        return head or "do not divide the global batch"
    if " are asked" in reason:
        return "too dear for the budget" if reason.startswith("costs") else "too slow for the days"
    return "on the front as well" if "% time" in reason else reason


def _verdict(plan: Plan) -> Iterator[str]:
    taken, request = plan.recommended, plan.request
    fit = [(each.name, each.reason) for each in plan.options if each.memory.verdict == "FITS"]
    late = [each for each in (*fit, *plan.refused) if each[1].endswith(" are asked")]
    is_able = plan.options or any(reason.startswith("OOM") for _, reason in plan.refused)
    if not is_able and plan.refused and not late:
        first = plan.refused[0]
        is_told = {reason for _, reason in plan.refused} == {_kind(first[1])}  # in the table
        yield "nothing could be tried" + f": {': '.join(first)}" * (not is_told)
        return
    if taken is None:
        yield from _why_none(late)
        return
    yield f"{taken.name}: {taken.step_time} a step"
    if request.tokens:
        middle, low, high = taken.days(request.tokens)
        hours = taken.gpu_hours(request.tokens)
        price = request.price
        cost = f", {hours * price:,.0f} at {price:g} an hour" if price else ""
        yield (
            f"   {request.tokens:,.3g} tokens in {middle:,.1f} days ({low:,.1f} to {high:,.1f}), "
            f"{hours:,.0f} GPU hours{cost}; without restarts and checkpoints"
        )
    if below := _next_below(plan, taken):
        yield (
            f"   no whole nodes between {below:,} and {taken.gpus:,} GPUs divide "
            f"{plan.space.global_batch:,} sequences; with another --global-batch fewer may do"
        )
    if plan.alike:
        have = "other has" if len(plan.alike) == 1 else "others have"
        yield (
            f"   {len(plan.alike)} {have} as many GPUs and its time in the band; {SURER}"
        )


def _why_none(late: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The remedy where nothing is taken, and the candidate that is `late` or too dear by least."""
    dear = [each for each in late if each[1].startswith("costs")]  # and in time
    if dear:
        yield "nothing fits in time and budget: try a larger budget"
    else:
        more = "more days" if late else "smaller micro-batches; `zsim fit` tries offloading too"
        yield f"nothing fits{' in time' if late else ''}: try more nodes, or {more}"
    if late:
        name, reason = min(dear or late, key=lambda each: _figure(each[1]))
        yield f"   the {'cheapest' if dear else 'quickest'}: {name}: {reason}"


def _figure(reason: str) -> float:
    """The first number of a reason: days, or cost."""
    return float(next(re.finditer(r"[0-9][0-9,.]*", reason)).group().replace(",", ""))


def _next_below(plan: Plan, taken: Option) -> int:
    """GPUs of the largest cluster that was tried and is smaller, where no whole nodes between
    divide the global batch. 0 where some do, or none are between."""
    devices = taken.scenario.cluster.devices_per_node
    below = max((n * devices for n in plan.space.nodes if n * devices < taken.gpus), default=0)
    between = range(below + devices, taken.gpus, devices)
    divides = any(plan.space.global_batch % gpus == 0 for gpus in between)
    return below if plan.request.goal == "smallest" and between and not divides else 0
