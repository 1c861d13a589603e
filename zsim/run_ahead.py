"""How far the host runs ahead of its device: a launch waits while the queue of pending kernels is full."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.ops import Op

NONE = -1


def awaited(ops: Sequence[Op], *, launch_queue: int) -> list[int]:
    """By op: the op on the compute stream whose end the host awaits before it issues this one, or NONE.

    That is the last one that at least `launch_queue` kernels have been launched after, this op's included; an op that alone has more
    awaits the one before it. 0 stands for a queue without an end.
    """
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
