"""Time of a step by unit, told alike of simulated and of real ranks: every moment is some unit's.

While a unit computes the moment is its own. While only collectives run it is that of the one that
ends last. Other moments, in which the host prepares or copies run, are those of what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import RankRun, Span

COMPUTES = frozenset({"forward", "backward", "recompute", "optimizer"})
OPTIMIZER = "optimizer"
"""Name of the optimizer's own time, whatever it steps."""


def time_by_unit(rank: RankRun, step_ns: int) -> dict[str, int]:
    """Nanoseconds of each unit, largest first; their sum is `step_ns`. Empty without spans."""
    spans = sorted(
        (
            span for span in rank.spans
            if span.end_ns > span.start_ns and span.kind in COMPUTES | COLLECTIVES
        ),
        key=lambda span: span.start_ns,
    )
    times = Counter[str]()
    if spans:
        for name, ns in _moments(spans, step_ns):
            times[name] += ns
    return dict(times.most_common())


def _moments(spans: Sequence[Span], step_ns: int) -> Iterator[tuple[str, int]]:
    """Each interval in which the same spans run: its unit, and its nanoseconds."""
    ends = {end for span in spans for end in (span.start_ns, span.end_ns)}
    running: list[Span] = []
    following = 0
    for start, end in pairwise(sorted({0, *ends, step_ns})):
        running = [span for span in running if span.end_ns > start]
        while following < len(spans) and spans[following].start_ns <= start:
            running.append(spans[following])
            following += 1
        yield _name(running, spans[min(following, len(spans) - 1)]), end - start


def _name(running: Sequence[Span], coming: Span) -> str:
    """The unit that a moment is of: what computes, else what moves, else what comes."""
    span = max(running, key=lambda each: (each.kind in COMPUTES, each.end_ns), default=coming)
    return OPTIMIZER if span.kind == OPTIMIZER else span.unit
