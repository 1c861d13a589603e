"""`zsim show --time`: where a step's time goes, why communication is exposed, the critical path,
and what would hide it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from zsim.analysis.critical_path import LONGER, Exposed, Link, Why, explain, name
from zsim.analysis.exposure import COMPUTE_STREAM
from zsim.analysis.hide_communication import HIDDEN, Change, Hiding, hiding
from zsim.cli import report
from zsim.engine import error_bands
from zsim.engine.costs import Costs
from zsim.engine.step import simulate_step
from zsim.engine.timeline import Timeline
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Op
from zsim.runs import simulator
from zsim.scenario.plan import Planned

MOST = 12
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """A planned scenario with the timeline of its step and what that cost."""

    planned: Planned
    costs: Costs
    timeline: Timeline


def timed(case: Planned) -> Timed:
    """The step of the scenario simulated once, for all that is said of it."""
    costs = Costs(cluster=case.scenario.cluster, execution=case.scenario.executed)
    return Timed(case, costs, simulate_step(case.program, costs=costs))


def why(step: Timed) -> Why:
    """Why the scenario's steady step takes as long as it does. Where host and device are one
    thread, neither waits for the other."""
    found = explain(step.planned.program, step.timeline, launch_queue=step.costs.launch_queue)
    synchronous = step.planned.scenario.executed.synchronous
    return replace(found, host_bound_ns=0) if synchronous else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The step as a whole: its time and its band as a Run of it has them, and what of it is there
    since its parts are in one another's way.

    It is `interference_ns` longer because collectives slow down the kernels beside them, and
    `sharing_ns` longer because they share links: than the same step without the one, and without
    the other.
    """

    step_ns: int
    band_ns: tuple[int, int]
    calibration: str
    interference_ns: int
    sharing_ns: int


def whole(case: Timed) -> Whole:
    """The step of the scenario as it is, and simulated again without what slows it down."""
    scenario, program = case.planned.scenario, case.planned.program
    costs, timeline = case.costs, case.timeline
    step = simulator.timed(program, timeline, costs)
    undisturbed = Costs(
        cluster=scenario.cluster, execution=replace(scenario.executed, interference=False)
    )
    # if not, no simulation is needed to know
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
    """All of it for JSON; times in nanoseconds."""
    case = timed(planned)
    found, step, helps = why(case), whole(case), hiding(planned, case.timeline)
    return {
        "step_time_ns": found.step_ns,
        "step_time_band_ns": step.band_ns,
        "calibration": step.calibration,
        "rank": found.rank,
        "interference_ns": step.interference_ns,
        "sharing_ns": step.sharing_ns,
        "host_bound": found.host_bound,
        "host_bound_ns": found.host_bound_ns,
        "exposed_by_reason_ns": found.by_reason,
        "exposed_before_forward_ns": found.before_ns,
        "exposed_after_backward_ns": found.after_ns,
        "exposed": [
            {
                "op": one.op.index,
                "name": name(one.op),
                "start_ns": one.start_ns,
                "duration_ns": one.duration_ns,
                "exposed_ns": one.exposed_ns,
                "before_forward_ns": one.before_ns,
                "after_backward_ns": one.after_ns,
                "reason": one.reason,
                "by_reason_ns": dict(one.parts),
                "waited_for": one.waited_for,
            }
            for one in found.exposed
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
            for link in found.critical_path
        ],
        "as_it_is": _change(helps.now),
        "what_would_hide_it": [_change(change) for change in helps.changes],
        "gains_nothing": list(helps.useless),
        "gains_elsewhere": list(helps.elsewhere),
        "untried": helps.untried,
    }


def _change(change: Change) -> dict[str, Any]:
    found = {"change": change.label, "ns_per_token": change.ns_per_token, "exposed": change.exposed}
    found |= {
        "exposed_at_ends": change.at_ends, "hides": change.hides, "hides_all": change.hides_all
    }
    memory = {
        "memory": change.memory, "needed_bytes": change.needed_bytes,
        "capacity_bytes": change.capacity_bytes,
    }
    return found | memory if change.memory else found


def show(planned: Planned) -> None:
    """The same in words."""
    case = timed(planned)
    found = why(case)
    for line in lines(
        found, hiding(planned, case.timeline), step=whole(case),
        synchronous=planned.scenario.executed.synchronous,
        hosted_ns=hosted_ns(planned.program.of_rank(found.rank).steady, case.costs),
    ):
        report.say(line)


def hosted_ns(ops: Sequence[Op], costs: Costs) -> int:
    """Nanoseconds of what the host computes itself, as the step of an optimizer whose states it
    holds."""
    own = (tuple([kernel for kernel in op.kernels if kernel.location == "host"]) for op in ops)
    return sum(costs.compute_ns(kernels) for kernels in own if kernels)


def lines(
    found: Why, helps: Hiding, *, step: Whole, synchronous: bool = False, hosted_ns: int = 0
) -> Iterator[str]:
    """The report, line by line; in `hosted_ns` the host computes itself."""
    waits = format_time(found.host_bound_ns)
    took = report.step_words(step.step_ns, step.band_ns, step.calibration)
    yield (
        f"step of {took} on rank {found.rank}; compute is idle until the host issues it for {waits}"
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
            f"at its memory's bandwidth: more nodes to "
            "share them help, or states on the device"
        )
    elif found.host_bound:
        yield (
            "  bound by the host: fewer and larger kernels (a larger micro-batch, "
            "execution.compile) help, faster devices do not"
        )
    yield (
        f"exposed communication {format_time(found.exposed_ns)}, "
        f"{_percent(found.exposed_ns / max(1, found.step_ns))}"
    )
    for reason, ns in found.by_reason.items():
        held = "" if reason == LONGER else "held back by "
        yield f"  {format_time(ns):>10}  {held}{reason}"
    if found.at_ends_ns:
        where = (
            (found.before_ns, "before the first of forward"),
            (found.after_ns, "after the last of a backward"),
        )
        ends = ", ".join(f"{format_time(ns)} {place}" for ns, place in where if ns)
        yield f"  at the ends, where there is no compute to hide it: {ends}"
    yield from _listed(
        _exposed_line(alike)
        for alike in _together(found.exposed, lambda one: one.exposed_ns, _of_exposed)
    )
    ops = "1 op" if len(found.critical_path) == 1 else f"{len(found.critical_path)} ops"
    yield f"critical path, {ops}, most of it in:"
    for waited, ns in _waited(found.critical_path):
        yield f"    waiting for {waited:<31} {format_time(ns):>10}"
    longest = _together(found.critical_path, _link_ns, lambda link: (name(link.op), link.then))[
        :MOST
    ]
    for alike in sorted(longest, key=lambda alike: alike[0].start_ns):
        yield (
            f"    {name(alike[0].op):<32} "
            f"{format_time(sum(map(_link_ns, alike))):>10}{_times(alike)}  {alike[0].then}"
        )
    yield from _proposals(helps)


def _proposals(helps: Hiding) -> Iterator[str]:
    """What would hide the communication and what gains nothing; of the ends alone what would make
    them shorter."""
    now, tokens = helps.now, f"({helps.now.ns_per_token:,.0f} ns for each token now)"
    if now.hides_all:
        yield f"communication is hidden: less than {100 * HIDDEN:.0f} % of the step is exposed"
        return
    asked = "what would hide it"
    if now.hides:
        ends = (
            f"{_percent(now.at_ends)} at its ends, which no lookahead hides and a larger "
            f"micro-batch only spreads over more tokens"
        )
        yield (
            f"what compute can hide is hidden: {_percent(now.inside)} of the step is exposed "
            f"besides {ends}"
        )
        asked = "what would make the ends shorter"
    if helps.untried:
        yield f"{asked} is not computed, to be done in seconds: {helps.untried}"
        return
    yield f"{asked} {tokens}:"
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
    """Those with equal keys, as of an op of every micro-batch; the most nanoseconds first."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.values(), key=lambda alike: -sum(map(ns, alike)))


def _of_exposed(one: Exposed) -> object:
    return name(one.op), one.reason, one.waited_for


def _waited(path: Sequence[Link]) -> list[tuple[str, int]]:
    """What the path waited for while none of its ops ran, and for how long in all.

    Of the host it says what was still to be issued: compute that depends on a collective waits for
    that, and not for the host.
    """
    found = Counter[str]()
    for link in path:
        if link.waited_ns:
            issued = (
                "collectives"
                if link.op.kind in COLLECTIVES
                else "kernels"
                if link.op.stream == COMPUTE_STREAM
                else "copies"
            )
            found[
                link.waited_for + (f" to issue {issued}" if link.waited_for == "the host" else "")
            ] += link.waited_ns
    return found.most_common()


def _link_ns(link: Link) -> int:
    return link.end_ns - link.start_ns


def _times(alike: Sequence[object]) -> str:
    return f" in {len(alike)} ops" if len(alike) > 1 else ""


def _exposed_line(alike: Sequence[Exposed]) -> str:
    first, by_reason = alike[0], Counter[str]()
    for one in alike:
        by_reason.update(dict(one.parts))
    after = f" after {first.waited_for}" if first.waited_for else ""
    others = "".join(
        f"; {format_time(ns)} {reason}"
        for reason, ns in by_reason.most_common()
        if reason != first.reason
    )
    exposed, duration = sum(one.exposed_ns for one in alike), sum(one.duration_ns for one in alike)
    took = f"{format_time(exposed):>10} of {format_time(duration):<10}"
    return f"    {name(first.op):<32} {took} {first.reason}{after}{others}{_times(alike)}"


def _listed(found: Iterator[str]) -> Iterator[str]:
    """The first of them, and how many more there are."""
    every = list(found)
    yield from every[:MOST]
    if len(every) > MOST:
        yield f"    … and {len(every) - MOST} more"
