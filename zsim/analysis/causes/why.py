"""Causes of exposed communication, and the critical path: as data, as text and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

from zsim.analysis.causes.exposure import COMPUTE_STREAM
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Op, Resource, resource_of

Reason = Literal[
    "a dependency",
    "the host",
    "its communicator's queue",
    "its stream",
    "another rank",
    "a shared link",
    "longer than the compute over it",
]
LAYER = re.compile(r"\.(\d+)\b")
"""The number of a layer in an fqn."""
SHARED: Reason = "a shared link"
LONGER: Reason = "longer than the compute over it"
WORDS: dict[str, str] = {
    "a dependency": "behind an op that it depends on",
    "the host": "behind the host, which issues it",
    "its communicator's queue": "queued behind another collective on the same communicator",
    "its stream": "queued behind another op on its stream",
    "another rank": "behind another rank",
    "a shared link": "slowed by another collective on its links",
    "longer than the compute over it": "longer than the compute that could hide it",
}
"""Reasons in the sum of a step, as its report words them."""
RESOURCES: dict[Resource, str] = {
    "drives": "reads and writes of drives",
    "copies": "copies between device and host",
    "host": "the optimizer's step on the host",
}
"""Work off the device on the critical path, as its report words it."""
Waited = Literal["", "the host", "another rank"]
MOST = 12
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A collective during which the compute stream is idle for `exposed_ns`, and why: `parts` are
    those nanoseconds by reason, largest first. `waited_for` is the op that the first of them is
    about, or else the one that it began after ("" for none). Of those nanoseconds `before_ns` are
    before the first of forward, and `after_ns` follow the last of a backward, on which the
    collective depends."""

    op: Op
    start_ns: int
    duration_ns: int
    exposed_ns: int
    parts: tuple[tuple[Reason, int], ...]
    waited_for: str
    before_ns: int = 0
    after_ns: int = 0

    @property
    def reason(self) -> Reason:
        """Reason for most of its exposed time."""
        return self.parts[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalOp:
    """An op on the critical path, how long it takes there, and why the one after it could not start
    earlier.

    Where no op of the path ran for `waited_ns` before it, it waited for `waited_for`: the host, or
    another rank.
    """

    op: Op
    start_ns: int
    end_ns: int
    then: str
    waited_ns: int = 0
    waited_for: Waited = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Exposed collectives of one rank's steady step, largest first, its critical path, and the
    exposed time by reason."""

    rank: int
    step_ns: int
    exposed: tuple[Exposed, ...]
    critical_path: tuple[CriticalOp, ...]
    host_bound_ns: int

    def __repr__(self) -> str:
        exposed = f"{format_time(self.exposed_ns)} of {format_time(self.step_ns)} exposed"
        reasons = ", ".join(f"{format_time(ns)} {why}" for why, ns in self.by_reason.items())
        return f"<Why of rank {self.rank}: {exposed}{': ' if reasons else ''}{reasons[:100]}>"

    def __str__(self) -> str:
        """Exposed communication by reason and by collective, and the critical path."""
        took = f"step of {format_time(self.step_ns)} on rank {self.rank}"
        return "\n".join([took, *why_lines(self)])

    def to_dict(self) -> dict[str, Any]:
        """The object of `zsim show --time --json` that says why; its keys are stable."""
        return as_object(self)

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @property
    def exposed_ns(self) -> int:
        """Exposed nanoseconds of all collectives."""
        return sum(collective.exposed_ns for collective in self.exposed)

    @property
    def before_ns(self) -> int:
        """Exposed nanoseconds before the first forward."""
        return sum(collective.before_ns for collective in self.exposed)

    @property
    def after_ns(self) -> int:
        """Exposed nanoseconds after the last backward, which nothing could hide."""
        return sum(collective.after_ns for collective in self.exposed)

    @property
    def at_ends_ns(self) -> int:
        """Exposed nanoseconds at either end, which no compute could hide."""
        return self.before_ns + self.after_ns

    @property
    def by_reason(self) -> dict[str, int]:
        """Exposed nanoseconds by reason, largest first."""
        totals: dict[str, int] = {}
        for collective in self.exposed:
            for reason, ns in collective.parts:
                totals[reason] = totals.get(reason, 0) + ns
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def off_device(self) -> dict[Resource, int]:
        """Nanoseconds of the critical path's ops off the device by resource, largest first."""
        totals = Counter[Resource]()
        for link in self.critical_path:
            if resource := resource_of(link.op):
                totals[resource] += _link_ns(link)
        return dict(totals.most_common())

    @property
    def host_bound(self) -> bool:
        """True where the device waits for the host in more than a tenth of the step."""
        return self.host_bound_ns * 10 > self.step_ns


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
        **({"critical_off_device_ns": why.off_device} if why.off_device else {}),
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


def why_lines(why: Why, *, alone: bool = False) -> Iterator[str]:
    """Exposed communication by reason and by collective, unless the rank is `alone`, and the
    critical path."""
    if not alone:
        share = percent(why.exposed_ns / max(1, why.step_ns))
        yield f"exposed communication {format_time(why.exposed_ns)}, {share}"
    for reason, ns in why.by_reason.items():
        yield f"  {format_time(ns):>10}  {WORDS[reason]}"
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
    for resource, ns in why.off_device.items():
        share = percent(ns / max(1, why.step_ns))
        yield f"    {RESOURCES[resource]:<43} {format_time(ns):>10}, {share} of the step"
    longest = _together(why.critical_path, _link_ns, _of_link)[:MOST]
    for alike in sorted(longest, key=lambda alike: alike[0].start_ns):
        yield (
            f"    {_layers([name(link.op) for link in alike]):<32} "
            f"{format_time(sum(map(_link_ns, alike))):>10}{_times(alike)}  "
            f"{_layers([link.then for link in alike])}"
        )


def _of_link(link: CriticalOp) -> object:
    """Key of ops that differ in their layer alone."""
    return LAYER.sub(".*", name(link.op)), LAYER.sub(".*", link.then)


def _layers(texts: Sequence[str]) -> str:
    """The first of `texts`, which differ in the number of a layer, with the range of its numbers:
    "backward blocks.21-30"."""
    numbers = {int(match[1]) for text in texts if (match := LAYER.search(text))}
    low, high = (min(numbers), max(numbers)) if numbers else (0, 0)
    if low == high:
        return texts[0]
    apart = "-" if high - low + 1 == len(numbers) else " to "
    return LAYER.sub(f".{low}{apart}{high}", texts[0], count=1)


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
