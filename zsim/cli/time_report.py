"""The report of `zsim show --time`: a step's time, its exposed communication, its critical path,
and changes that would hide communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from zsim import api
from zsim.analysis.critical_path import LONGER, CriticalOp, Exposed, Why, name
from zsim.analysis.exposure import COMPUTE_STREAM
from zsim.analysis.hide_communication import HIDDEN, Change, Hiding, hiding
from zsim.cli import report
from zsim.engine import error_bands
from zsim.engine.costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import Timeline
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Op
from zsim.runs import simulator
from zsim.scenario.plan import Planned

MOST = 12
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A planned scenario with the timeline of its step and what that cost."""

    planned: Planned
    costs: Costs
    timeline: Timeline


def timed(case: Planned) -> TimedStep:
    """The scenario's step, simulated once for all parts of the report."""
    costs = Costs(cluster=case.scenario.cluster, execution=case.scenario.executed)
    return TimedStep(case, costs, simulate_step(case.program, costs=costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Time and band of the step, as a Run has them, and the share of it that contention costs.

    `interference_ns`: nanoseconds more than in a step whose collectives slow down no kernels.
    `sharing_ns`: nanoseconds more than in a step whose collectives share no links.
    """

    step_ns: int
    band_ns: tuple[int, int]
    calibration: str
    interference_ns: int
    sharing_ns: int


def whole(case: TimedStep) -> Whole:
    """The scenario's step, simulated again without interference and without shared links."""
    scenario, program = case.planned.scenario, case.planned.program
    costs, timeline = case.costs, case.timeline
    step = simulator.timed(program, timeline, costs)
    undisturbed = Costs(
        cluster=scenario.cluster, execution=replace(scenario.executed, interference=False)
    )
    # where no collectives share links, no simulation is needed
    shares = any(any(times.shared.values()) for times in timeline.ranks.values())
    return Whole(
        step_ns=step.ns,
        band_ns=step.band_ns,
        calibration=error_bands.calibration(scenario.cluster, scenario.executed),
        interference_ns=step.ns - simulate_step(program, costs=undisturbed).step_time_ns,
        sharing_ns=step.ns - simulate_step(program, costs=costs, contention=False).step_time_ns
        if shares
        else 0,
    )


def as_object(planned: Planned) -> dict[str, Any]:
    """The report as a JSON object; times in nanoseconds."""
    case = timed(planned)
    reasons = api.reasons(planned.scenario, planned.program, case.timeline)
    step, helps = whole(case), hiding(planned, case.timeline)
    return {
        "step_time_ns": reasons.step_ns,
        "step_time_band_ns": step.band_ns,
        "calibration": step.calibration,
        "rank": reasons.rank,
        "interference_ns": step.interference_ns,
        "sharing_ns": step.sharing_ns,
        "host_bound": reasons.host_bound,
        "host_bound_ns": reasons.host_bound_ns,
        "exposed_by_reason_ns": reasons.by_reason,
        "exposed_before_forward_ns": reasons.before_ns,
        "exposed_after_backward_ns": reasons.after_ns,
        "exposed": [
            {
                "op": collective.op.index,
                "name": name(collective.op),
                "start_ns": collective.start_ns,
                "duration_ns": collective.duration_ns,
                "exposed_ns": collective.exposed_ns,
                "before_forward_ns": collective.before_ns,
                "after_backward_ns": collective.after_ns,
                "reason": collective.reason,
                "by_reason_ns": dict(collective.parts),
                "waited_for": collective.waited_for,
            }
            for collective in reasons.exposed
        ],
        "critical_path": [
            {
                "op": link.op.index,
                "name": name(link.op),
                "start_ns": link.start_ns,
                "end_ns": link.end_ns,
                "then": link.then,
                "waited_ns": link.waited_ns,
                "waited_for": link.waited_for,
            }
            for link in reasons.critical_path
        ],
        "as_it_is": _change(helps.now),
        "what_would_hide_it": [_change(change) for change in helps.changes],
        "gains_nothing": list(helps.useless),
        "gains_elsewhere": list(helps.elsewhere),
        "untried": helps.untried,
    }


def _change(change: Change) -> dict[str, Any]:
    entry = {"change": change.label, "ns_per_token": change.ns_per_token, "exposed": change.exposed}
    entry |= {
        "exposed_at_ends": change.at_ends, "hides": change.hides, "hides_all": change.hides_all
    }
    memory = {
        "memory": change.memory, "needed_bytes": change.needed_bytes,
        "capacity_bytes": change.capacity_bytes,
    }
    return entry | memory if change.memory else entry


def show(planned: Planned) -> None:
    """Print the report as text."""
    case = timed(planned)
    reasons = api.reasons(planned.scenario, planned.program, case.timeline)
    for line in lines(
        reasons, hiding(planned, case.timeline), step=whole(case),
        synchronous=planned.scenario.executed.synchronous,
        hosted_ns=hosted_ns(planned.program.of_rank(reasons.rank).steady, case.costs),
    ):
        report.say(line)


def hosted_ns(ops: Sequence[Op], costs: Costs) -> int:
    """Nanoseconds of kernels on the host, as of an optimizer with states in host memory."""
    own = (tuple([kernel for kernel in op.kernels if kernel.location == "host"]) for op in ops)
    return sum(costs.compute_ns(kernels) for kernels in own if kernels)


def lines(
    reasons: Why, helps: Hiding, *, step: Whole, synchronous: bool = False, hosted_ns: int = 0
) -> Iterator[str]:
    """Lines of the report; `hosted_ns`: nanoseconds of kernels on the host."""
    waits = format_time(reasons.host_bound_ns)
    took = report.step_words(step.step_ns, step.band_ns, step.calibration)
    yield (
        f"step of {took} on rank {reasons.rank}; compute is idle until the host issues it for "
        f"{waits}"
    )
    if step.interference_ns:
        yield (
            f"  {format_time(step.interference_ns)} of the step because collectives slow down the "
            f"kernels beside them"
        )
    if step.sharing_ns:
        yield f"  {format_time(step.sharing_ns)} of the step because collectives share links"
    if synchronous:
        yield (
            "  one thing after another: on a CPU FSDP waits for each collective where it calls "
            "it, so nothing hides any"
        )
    if hosted_ns:
        yield (
            f"  {format_time(hosted_ns)} of the host's own step of the optimizer and its copies, "
            "at its memory's bandwidth; more nodes to share them help, or states on the device"
        )
    elif reasons.host_bound:
        yield (
            "  bound by the host: fewer and larger kernels (a larger micro-batch, "
            "execution.compile) help, faster devices do not"
        )
    yield (
        f"exposed communication {format_time(reasons.exposed_ns)}, "
        f"{_percent(reasons.exposed_ns / max(1, reasons.step_ns))}"
    )
    for reason, ns in reasons.by_reason.items():
        held = "" if reason == LONGER else "held back by "
        yield f"  {format_time(ns):>10}  {held}{reason}"
    if reasons.at_ends_ns:
        where = (
            (reasons.before_ns, "before the first of forward"),
            (reasons.after_ns, "after the last of a backward"),
        )
        ends = ", ".join(f"{format_time(ns)} {end}" for ns, end in where if ns)
        yield f"  at the ends, where there is no compute to hide it: {ends}"
    yield from _listed(
        _exposed_line(alike)
        for alike in _together(reasons.exposed, attrgetter("exposed_ns"), _of_exposed)
    )
    ops = "1 op" if len(reasons.critical_path) == 1 else f"{len(reasons.critical_path)} ops"
    yield f"critical path, {ops}, most of it in:"
    for waited, ns in _waited(reasons.critical_path):
        yield f"    waiting for {waited:<31} {format_time(ns):>10}"
    longest = _together(reasons.critical_path, _link_ns, lambda link: (name(link.op), link.then))[
        :MOST
    ]
    for alike in sorted(longest, key=lambda alike: alike[0].start_ns):
        yield (
            f"    {name(alike[0].op):<32} "
            f"{format_time(sum(map(_link_ns, alike))):>10}{_times(alike)}  {alike[0].then}"
        )
    yield from _proposals(helps)


def _proposals(helps: Hiding) -> Iterator[str]:
    """Lines on changes that would hide communication, and on those that gain nothing.

    Where only the ends of the step are exposed: changes that would shorten them.
    """
    now, tokens = helps.now, f"({helps.now.ns_per_token:,.0f} ns for each token now)"
    if now.hides_all:
        yield f"communication is hidden: less than {100 * HIDDEN:.0f} % of the step is exposed"
        return
    heading = "what would hide it"
    if now.hides:
        ends = (
            f"{_percent(now.at_ends)} at its ends, which no lookahead hides and a larger "
            f"micro-batch only spreads over more tokens"
        )
        yield (
            f"what compute can hide is hidden: {_percent(now.inside)} of the step is exposed "
            f"besides {ends}"
        )
        heading = "what would make the ends shorter"
    if helps.untried:
        yield f"{heading} is not computed, to be done in seconds: {helps.untried}"
        return
    yield f"{heading} {tokens}:"
    for change in helps.changes:
        memory = f"; {change.memory_words}" if change.memory_words else ""
        idle = "" if change.gains(now) else ", which gains nothing"
        yield (
            f"    {change.label:<48} {_verdict(change, now)}, {change.ns_per_token:,.0f} ns for "
            f"each token{idle}{memory}"
        )
    if helps.useless:
        yield f"    nothing is gained by {' or '.join(helps.useless)}"
    if helps.elsewhere:
        yield f"    {' and '.join(helps.elsewhere)} make the step shorter, but not its ends"


def _verdict(change: Change, now: Change) -> str:
    ends = f" and {_percent(change.at_ends)} at the ends" if change.at_ends else ""
    hides = change.hides_all if now.hides else change.hides
    return (
        f"{'hides it: ' if hides and not now.hides else ''}leaves {_percent(change.inside)} "
        f"exposed{ends}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _together(
    items: Iterable[T], ns: Callable[[T], int], key: Callable[[T], object]
) -> list[list[T]]:
    """Groups of items with equal keys, as an op of every micro-batch, the longest first."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.values(), key=lambda alike: -sum(map(ns, alike)))


def _of_exposed(collective: Exposed) -> object:
    return name(collective.op), collective.reason, collective.waited_for


def _waited(path: Sequence[CriticalOp]) -> list[tuple[str, int]]:
    """Causes of the critical path's gaps, each with its nanoseconds, the longest first.

    For the host it names the ops still to be issued. Compute that depends on a collective waits for
    the collective, and not for the host.
    """
    waits = Counter[str]()
    for link in path:
        if link.waited_ns:
            issued = (
                "collectives"
                if link.op.kind in COLLECTIVES
                else "kernels"
                if link.op.stream == COMPUTE_STREAM
                else "copies"
            )
            waits[
                link.waited_for + (f" to issue {issued}" if link.waited_for == "the host" else "")
            ] += link.waited_ns
    return waits.most_common()


def _link_ns(link: CriticalOp) -> int:
    return link.end_ns - link.start_ns


def _times(alike: Sequence[object]) -> str:
    return f" in {len(alike)} ops" if len(alike) > 1 else ""


def _exposed_line(alike: Sequence[Exposed]) -> str:
    first, by_reason = alike[0], Counter[str]()
    for collective in alike:
        by_reason.update(dict(collective.parts))
    after = f" after {first.waited_for}" if first.waited_for else ""
    others = "".join(
        f"; {format_time(ns)} {reason}"
        for reason, ns in by_reason.most_common()
        if reason != first.reason
    )
    exposed = sum(collective.exposed_ns for collective in alike)
    duration = sum(collective.duration_ns for collective in alike)
    took = f"{format_time(exposed):>10} of {format_time(duration):<10}"
    return f"    {name(first.op):<32} {took} {first.reason}{after}{others}{_times(alike)}"


def _listed(rows: Iterator[str]) -> Iterator[str]:
    """The first `MOST` rows, and a line with the number of the others."""
    every = list(rows)
    yield from every[:MOST]
    if len(every) > MOST:
        yield f"    … and {len(every) - MOST} more"
