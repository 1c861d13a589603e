"""Notes on spans that a record has not: reasons, algorithms, memory by kind, rates of links.

They follow from the Program and its simulation. A trace takes them as data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanNote:
    """Arguments of one span in the trace, and the span that it waited for, by its number, with the
    reason."""

    arguments: Mapping[str, str | int | float] = field(default_factory=dict)
    cause: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankNotes:
    """Notes of one rank: on spans by number, and counters as times in ns with their values.

    `kernels` of a span are operators with the ns that each takes alone, in sequence. `memory` has
    bytes by kind, `rates` the bytes/s on each of the rank's links.
    """

    spans: Mapping[int, SpanNote] = field(default_factory=dict)
    kernels: Mapping[int, Sequence[tuple[str, int]]] = field(default_factory=dict)
    memory: Sequence[tuple[int, Mapping[str, int]]] = ()
    rates: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)


TraceNotes = Mapping[int, RankNotes]
"""Notes by rank."""
