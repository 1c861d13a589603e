"""The launch queue: the host waits while the queue of pending kernels is full, or, where it is
synchronous, for each op before it."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.ir.ops import Op

NONE = -1
IN_CALLER = 1
"""Value of `launch_queue` for kernels that run in their caller, as on a CPU. The host does nothing
else meanwhile; collectives go on by threads of their own."""
SYNCHRONOUS = -1
"""Value of `launch_queue` for a host that does one thing after another, without a queue."""


def awaited(ops: Sequence[Op], *, launch_queue: int) -> list[int]:
    """The op whose end the host awaits before it issues an op, or NONE, op by op.

    With a `launch_queue` of SYNCHRONOUS that is the op before it, with IN_CALLER the last op before
    it with kernels. Otherwise it is, on the compute
    stream, the last op followed by at least `launch_queue` kernels. These include the op's own, so
    an op with more kernels awaits the op before it. 0 is a queue without limit.
    """
    if launch_queue == SYNCHRONOUS:
        return [index - 1 if index else NONE for index in range(len(ops))]
    if launch_queue == IN_CALLER:
        return _last_kernels(ops)
    rooms, queue = [], list[tuple[int, int]]()
    launched = first = 0
    for op in ops:
        room = NONE
        if launch_queue and op.stream == "compute" and op.kernels:
            launched += len(op.kernels)
            while first < len(queue) and queue[first][1] <= launched - launch_queue:
                first += 1
            room = queue[first - 1][0] if first else NONE
            queue.append((op.index, launched))
        rooms.append(room)
    return rooms


def _last_kernels(ops: Sequence[Op]) -> list[int]:
    """The last op with kernels before each op, or NONE."""
    before, last = [], NONE
    for op in ops:
        before.append(last)
        if op.kernels:
            last = op.index
    return before
