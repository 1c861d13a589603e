"""The order of ops that streams and waits guarantee, whatever the durations."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.ir.ops import STREAMS, Op, Stream, leaves_device

NOTHING = (-1,) * len(STREAMS)


@dataclass(frozen=True, slots=True)
class Happened:
    """The latest op of each stream that has ended whenever an op has, op by op. Streams keep the
    order of issue."""

    clocks: tuple[tuple[int, ...], ...]
    streams: tuple[int, ...]

    def before(self, earlier: int, later: int) -> bool:
        """True when op `earlier` has ended whenever op `later` begins."""
        return earlier < later and self.clocks[later][self.streams[earlier]] >= earlier

    def awaits(self, stream: Stream, later: int) -> bool:
        """True when what was issued on `stream` in earlier phases has ended whenever op `later`
        begins: some op of this phase on it has."""
        return self.clocks[later][STREAMS.index(stream)] >= 0


def happened(ops: tuple[Op, ...]) -> Happened:
    """The guaranteed order of one phase. A host op that waits, or is work of the host's own, holds
    back whatever is issued after it."""
    host = STREAMS.index("host")
    tails: list[tuple[int, ...]] = [NOTHING] * len(STREAMS)
    blocked = NOTHING
    clocks: list[tuple[int, ...]] = []
    streams: list[int] = []
    for op in ops:
        stream = STREAMS.index(op.stream)
        known = [blocked, *(clocks[wait] for wait in op.waits)]
        if stream != host:
            known.append(tails[stream])
        clock = list(map(max, zip(*known, strict=True)))
        clock[stream] = op.index
        if stream == host and (op.waits or leaves_device(op)):
            blocked = tuple(clock)
        clocks.append(tuple(clock))
        streams.append(stream)
        tails[stream] = clocks[-1]
    return Happened(tuple(clocks), tuple(streams))
