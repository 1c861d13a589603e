"""The launch queue: the host waits while the queue of pending kernels is full, or, where it is
synchronous, for each op before it."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.ir.ops import Op

NONE = -1
SYNCHRONOUS = -1
"""A launch queue where there is none: the host does one thing after another."""


def awaited(ops: Sequence[Op], *, launch_queue: int) -> list[int]:
    """By op: the op whose end the host awaits before it issues this one, or NONE.

    With a `launch_queue` of SYNCHRONOUS that is the op before it. Otherwise, on the compute stream,
    it is the last op followed by at least `launch_queue` kernels, this op's included; an op with
    more kernels awaits the op before it. 0 is a queue without limit.
    """
    if launch_queue == SYNCHRONOUS:
        return [place - 1 if place else NONE for place in range(len(ops))]
    found, queue = [], list[tuple[int, int]]()
    launched = first = 0
    for op in ops:
        room = NONE
        if launch_queue and op.stream == "compute" and op.kernels:
            launched += len(op.kernels)
            while first < len(queue) and queue[first][1] <= launched - launch_queue:
                first += 1
            room = queue[first - 1][0] if first else NONE
            queue.append((op.index, launched))
        found.append(room)
    return found
