"""Work off the device in a simulated step: how long the device computes nothing beside it, and the
bytes of drives.

It reads ops with their times. Which of them are slow, and why, is `zsim.analysis.causes`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from zsim.ir.ops import COLLECTIVES, Op, resource_of
from zsim.ir.run import OffDevice
from zsim.runs.figures.intervals import TimeInterval, length_of, union_of


def off_device(
    ops: Sequence[Op], starts: Sequence[int], ends: Sequence[int]
) -> OffDevice | None:
    """Work off the device of a rank's steady `ops`, by their times in ns; None for none.

    A copy on the compute stream is no compute: it holds that stream up.
    """
    busy: list[TimeInterval] = []
    working: dict[str, list[TimeInterval]] = {"drives": [], "copies": [], "host": []}
    moved = {"read": 0, "write": 0}
    for op, start, end in zip(ops, starts, ends, strict=True):
        if resource := resource_of(op):
            working[resource].append((start, end))
            for kernel in op.kernels:
                if kernel.location == "drive":
                    moved[kernel.operator] += kernel.nbytes
        elif op.stream == "compute" and op.kind not in COLLECTIVES:
            busy.append((start, end))
    if not any(working.values()):
        return None
    computing = union_of(busy)

    def alone(intervals: Iterable[TimeInterval]) -> int:
        return length_of(union_of([*computing, *intervals])) - length_of(computing)

    return OffDevice(
        drives_ns=alone(working["drives"]), copies_ns=alone(working["copies"]),
        host_ns=alone(working["host"]), read_bytes=moved["read"], written_bytes=moved["write"],
    )


def largest(ranks: Iterable[OffDevice | None]) -> OffDevice | None:
    """Each figure of the rank that has most of it; None where no rank has any."""
    known = [rank for rank in ranks if rank is not None]
    return OffDevice(**{
        each.name: max(getattr(rank, each.name) for rank in known) for each in fields(OffDevice)
    }) if known else None
