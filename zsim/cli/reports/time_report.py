"""The report of `zsim show --time`: a step's time, its exposed communication, its critical path,
and changes that would hide communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zsim.analysis.causes.why import RESOURCES, Why, percent, why_lines
from zsim.analysis.hiding.hide_communication import HIDDEN, Change, Hiding, hiding
from zsim.analysis.simulated_step import explain_step
from zsim.cli import terminal
from zsim.cli.reports import run_report
from zsim.engine.bands import error_bands
from zsim.engine.costs import host_work
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.engine.timeline import Timeline, Times
from zsim.io.units import counted, format_time
from zsim.ir.ops import Op
from zsim.runs import fault_support
from zsim.runs.figures import step_time
from zsim.scenario.plan import Planned


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A planned scenario with the timeline of its step and what that cost."""

    planned: Planned
    costs: Costs
    timeline: Timeline


def timed(case: Planned) -> TimedStep:
    """The scenario's step, simulated once for all parts of the report."""
    fault_support.require_none(case.scenario, purpose="reasons of a clean step's time")
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
    step = step_time.timed(program, timeline, costs)
    undisturbed = Costs(
        cluster=scenario.cluster, execution=replace(scenario.executed, interference=False)
    )
    # where no collectives share links, no simulation is needed
    shares = any(any(times.shared.values()) for times in timeline.ranks.values())
    return Whole(
        step_ns=step.ns,
        band_ns=step.band_ns,
        calibration=error_bands.calibration(
            scenario.cluster, scenario.executed, uses_drives=scenario.offload.uses_drives
        ),
        interference_ns=step.ns - simulate_step(program, costs=undisturbed).step_time_ns,
        sharing_ns=step.ns - simulate_step(program, costs=costs, contention=False).step_time_ns
        if shares
        else 0,
    )


def as_object(planned: Planned) -> dict[str, Any]:
    """The report as a JSON object; times in nanoseconds."""
    case = timed(planned)
    reasons = explain_step(planned.scenario, planned.program, case.timeline)
    step, helps = whole(case), hiding(planned, case.timeline)
    return {
        **reasons.to_dict(),
        "step_time_band_ns": step.band_ns,
        "calibration": step.calibration,
        "interference_ns": step.interference_ns,
        "sharing_ns": step.sharing_ns,
        "as_it_is": _change(helps.now),
        "what_would_hide_it": [_change(change) for change in helps.changes],
        "gains_nothing": list(helps.useless),
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
    reasons = explain_step(planned.scenario, planned.program, case.timeline)
    ops = planned.program.of_rank(reasons.rank).steady
    for line in lines(
        reasons, hiding(planned, case.timeline), step=whole(case),
        synchronous=planned.scenario.executed.synchronous,
        hosted_ns=hosted_ns(
            ops, case.costs, case.timeline.ranks[case.timeline.representatives[reasons.rank]]
        ),
        host_bound=host_bound(ops, case.costs), alone=planned.scenario.world_size == 1,
    ):
        terminal.say_table(line)


def host_bound(ops: Sequence[Op], costs: Costs) -> str:
    """The bound of kernels on the host, with what helps: threads, cores or memory."""
    kernels = [each for op in ops for each in op.kernels if each.location == "host"]
    if not host_work.bound_by_threads(kernels, costs.cluster, costs.execution):
        return "bound by its memory's bandwidth; more nodes help"
    own = host_work.threads_of(costs.cluster)
    threads = host_work.threads_of(costs.cluster, costs.execution)
    if own and threads >= own:
        return f"bound by its {counted(costs.cluster.host.cores, 'core')}; more nodes help"
    counts = counted(int(threads), "thread")
    return f"bound by {counts} a rank; more help (OMP_NUM_THREADS, execution.host_threads)"


def hosted_ns(ops: Sequence[Op], costs: Costs, times: Times) -> int:
    """Nanoseconds of kernels on the host, as of an optimizer with states in host memory, and of
    their waits for its memory."""
    return sum(
        costs.compute_ns(own) + times.shared.get(op.index, 0)
        for op in ops
        if (own := tuple([kernel for kernel in op.kernels if kernel.location == "host"]))
    )


def lines(
    reasons: Why, helps: Hiding, *, step: Whole, synchronous: bool = False, hosted_ns: int = 0,
    host_bound: str = "", alone: bool = False,
) -> Iterator[str]:
    """Lines of the report; `hosted_ns`: nanoseconds of kernels on the host, whose bound is
    `host_bound`. A rank `alone` communicates with none."""
    waits = reasons.host_bound_ns
    host = f"waits {format_time(waits)} for the host" if waits else "never waits for the host"
    took = run_report.step_words(step.step_ns, step.band_ns, step.calibration)
    yield f"step of {took} on rank {reasons.rank}; compute {host}"
    if step.interference_ns:
        yield (
            f"  +{format_time(step.interference_ns)}: kernels slowed by collectives beside them"
        )
    if step.sharing_ns:
        work = "collectives, and the host's work," if hosted_ns else "collectives"
        yield f"  +{format_time(step.sharing_ns)}: {work} share links"
    if synchronous:
        yield (
            "  one thing after another: on a CPU FSDP waits for each collective where it calls "
            "it, so nothing hides any"
        )
    if hosted_ns:
        yield (
            f"  {format_time(hosted_ns)} of optimizer and copies on the host, "
            f"{host_bound}, or states on the device"
        )
    elif reasons.host_bound:
        yield (
            "  bound by the host: fewer and larger kernels (a larger micro-batch, "
            "execution.compile) help, faster devices do not"
        )
    yield from why_lines(reasons, alone=alone)
    yield from _proposals(helps, reasons, alone=alone)


def _proposals(helps: Hiding, reasons: Why, *, alone: bool) -> Iterator[str]:
    """Lines on changes that would hide communication, and on those that gain nothing.

    Where only the ends of the step are exposed: changes that would shorten them. Where nothing is:
    the work off the device that takes most of the step, if such work does.
    """
    now, tokens = helps.now, f"(now {_tokens_per_s(helps.now)})"
    if now.hides_all:
        hidden = "one rank has no communication to hide" if alone else (
            f"communication is hidden: less than {100 * HIDDEN:.0f} % of the step is exposed"
        )
        if 2 * sum(reasons.off_device.values()) > reasons.step_ns:
            resource, ns = next(iter(reasons.off_device.items()))
            share = percent(ns / reasons.step_ns)
            hidden += f"; what lasts is {RESOURCES[resource]}, {share} of the step"
        yield hidden
        return
    heading = "changes that hide it"
    if now.hides:
        yield (
            f"fully overlapped: {percent(now.inside)} of the step is exposed, plus "
            f"{percent(now.at_ends)} at its ends, which cannot overlap; a larger micro-batch "
            f"spreads these over more tokens"
        )
        heading = "changes that shorten the ends"
    if helps.untried:
        yield f"{heading} are not simulated: it would take minutes: {helps.untried}"
        return
    yield f"{heading} {tokens}:"
    for change in helps.changes:
        memory = f"; {change.memory_words}" if change.memory_words else ""
        yield (
            f"    {change.label:<34}  {_verdict(change, now)}; {_tokens_per_s(change)}{memory}"
        )
    if helps.useless:
        yield f"    no gain from: {', '.join(helps.useless)}"


def _verdict(change: Change, now: Change) -> str:
    ends = f" + {percent(change.at_ends)} at the ends" if change.at_ends else ""
    hides = change.hides_all if now.hides else change.hides
    return (
        f"{'hides it: ' if hides and not now.hides else ''}{percent(change.inside)} exposed{ends}"
    )


def _tokens_per_s(change: Change) -> str:
    return f"{1e9 / max(change.ns_per_token, 1e-9):,.0f} tokens/s per rank"
