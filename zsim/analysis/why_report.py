"""The report of a Why: its lines as `zsim show --time` prints them, and its JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from zsim.analysis.exposure import COMPUTE_STREAM
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Op

if TYPE_CHECKING:
    from zsim.analysis.critical_path import CriticalOp, Exposed, Why

MOST = 12
OF_ITSELF = "longer than the compute over it"
"""The reason that is no cause outside the collective."""
T = TypeVar("T")


def as_object(why: Why) -> dict[str, Any]:
    """The object of `zsim show --time --json` that says why; times in nanoseconds."""
    return {
        "step_time_ns": why.step_ns,
        "rank": why.rank,
        "host_bound": why.host_bound,
        "host_bound_ns": why.host_bound_ns,
        "exposed_by_reason_ns": why.by_reason,
        "exposed_before_forward_ns": why.before_ns,
        "exposed_after_backward_ns": why.after_ns,
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
            for collective in why.exposed
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
            for link in why.critical_path
        ],
    }


def name(op: Op) -> str:
    """The op as people say it: "all_gather blocks.3"."""
    return f"{op.kind} {op.unit}"


def lines(why: Why) -> Iterator[str]:
    """Exposed communication by reason and by collective, and the critical path."""
    yield (
        f"exposed communication {format_time(why.exposed_ns)}, "
        f"{percent(why.exposed_ns / max(1, why.step_ns))}"
    )
    for reason, ns in why.by_reason.items():
        held = "" if reason == OF_ITSELF else "held back by "
        yield f"  {format_time(ns):>10}  {held}{reason}"
    if why.at_ends_ns:
        where = (
            (why.before_ns, "before the first of forward"),
            (why.after_ns, "after the last of a backward"),
        )
        ends = ", ".join(f"{format_time(ns)} {end}" for ns, end in where if ns)
        yield f"  at the ends, where there is no compute to hide it: {ends}"
    yield from _listed(
        _exposed_line(alike)
        for alike in _together(why.exposed, attrgetter("exposed_ns"), _of_exposed)
    )
    ops = "1 op" if len(why.critical_path) == 1 else f"{len(why.critical_path)} ops"
    yield f"critical path, {ops}, most of it in:"
    for waited, ns in _waited(why.critical_path):
        yield f"    waiting for {waited:<31} {format_time(ns):>10}"
    longest = _together(why.critical_path, _link_ns, lambda link: (name(link.op), link.then))[
        :MOST
    ]
    for alike in sorted(longest, key=lambda alike: alike[0].start_ns):
        yield (
            f"    {name(alike[0].op):<32} "
            f"{format_time(sum(map(_link_ns, alike))):>10}{_times(alike)}  {alike[0].then}"
        )


def percent(share: float) -> str:
    """A share as text in percent."""
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
