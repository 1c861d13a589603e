"""The work of simulating a Program's rings as steps, in events; too much is refused beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import floor, log10, sqrt
from typing import NamedTuple

from zsim.cluster.collectives import LIBRARIES, ring
from zsim.cluster.library import RING
from zsim.engine.ring_steps.plan import finer_slices
from zsim.engine.timeline import RingCosts
from zsim.errors import ZsimError
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program

MOST_EVENTS = 4_000_000
"""Most hops of chunks, and ways of chunks over shared links, in a step.

A round of its simulation then takes some half a minute, 5 us for a hop and 10 for a way over a
shared link. There are three or four.
"""
HOPS = "the hops of chunks"
SHARED = f"{HOPS} and their ways over shared links"


class EventsError(ZsimError):
    """Rings with more steps than can be simulated in some minutes."""


class IssuedCollective(NamedTuple):
    """Kind, bytes and root of a collective, the name of its group and the ranks in it."""

    kind: str
    nbytes: int
    root: int
    group: str
    ranks: tuple[int, ...]

    def goes_round(self, costs: RingCosts) -> bool:
        """True where its time is that of a ring of several ranks."""
        return len(self.ranks) > 1 and self.algorithm(costs) == RING

    def algorithm(self, costs: RingCosts) -> str:
        """The library's algorithm."""
        return costs.algorithm(self.kind, self.nbytes, self.ranks)


def collectives(program: Program) -> Iterator[tuple[IssuedCollective, int]]:
    """The different collectives of a steady step and how often each is issued, by the member that
    issues it most."""
    of_kind = [
        Counter(
            (op.group, op.kind, op.nbytes, op.root) for op in rank.steady if op.kind in COLLECTIVES
        )
        for rank in program.ranks
    ]
    for name in sorted({group for issued in of_kind for group, *_ in issued}):
        for ranks in program.mesh.groups(name):
            most = Counter[tuple[str, str, int, int]]()
            for kind in dict.fromkeys(program.assignment[rank] for rank in ranks):
                most |= of_kind[kind]
            for (group, op, nbytes, root), count in most.items():
                if group == name:
                    yield IssuedCollective(op, nbytes, root, group, ranks), count


def require_few(events: int, *, kind: str = HOPS) -> None:
    """EventsError for more than MOST_EVENTS; `kind` they are.

    They grow with the layers, and with the square of the ranks of a ring.
    """
    if events > MOST_EVENTS:
        share = MOST_EVENTS / events
        raise EventsError(
            where='execution.detail = "steps"',
            expected=f"at most {MOST_EVENTS:,} events",
            found=f"{events:,}, {kind}",
            remedy=(
                'take detail = "flows", which needs none of them; small enough are about '
                f"{_percent(share)} of the layers, or {_percent(sqrt(share))} of the ranks"
            ),
        )


def _percent(share: float) -> str:
    """`share` in percent, rounded down to two digits."""
    digits = 1 - floor(log10(100 * share))
    return f"{floor(100 * share * 10**digits) / 10**digits:g} %"


def num_hops(program: Program, costs: RingCosts) -> int:
    """Hops of chunks of all rings in a steady step."""
    return sum(
        count * _num_sends(each, costs)
        for each, count in collectives(program)
        if each.goes_round(costs)
    )


def _num_sends(each: IssuedCollective, costs: RingCosts) -> int:
    if each.kind == "broadcast":
        finer = finer_slices(each.nbytes, each.ranks, costs)
        return ring.num_sends(each.kind, each.nbytes, group_size=len(each.ranks), finer=finer)
    num_sends = LIBRARIES[costs.cluster.collectives].num_sends
    return num_sends(each.kind, each.nbytes, group_size=len(each.ranks))


def closed_forms(program: Program, costs: RingCosts) -> tuple[str, ...]:
    """The collectives of several ranks that go round no ring, each once, as "all_reduce over
    dp_shard (nvls)"."""
    kinds = {
        f"{each.kind} over {each.group} ({each.algorithm(costs)})"
        for each, _ in collectives(program)
        if len(each.ranks) > 1 and not each.goes_round(costs)
    }
    return tuple(sorted(kinds))
