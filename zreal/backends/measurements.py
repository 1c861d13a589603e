"""Measurements of all ranks as one: the slowest rank's."""

from __future__ import annotations

from zsim.calibration.machine import machine_load
from zsim.runs.backend import RepeatedCall


def slowest(ranks: list[list[list[int]]]) -> tuple[tuple[int, ...], ...]:
    """The largest of all ranks, measurement by measurement and repetition by repetition; ranks
    without a measurement have none of it."""
    return tuple(
        tuple(max(turn) for turn in zip(*(times for times in each if times), strict=True))
        for each in zip(*ranks, strict=True)
    )


def others_share(loads: list[list[int] | None]) -> float:
    """The share of the machine's cores that others took while ranks measured it."""
    known = [load for load in loads if load]
    if len(known) < len(loads):
        return 0.0
    wall, own, machine = zip(*known, strict=True)
    return machine_load.others_share(max(wall), sum(own), max(machine))


def durations(ranks: list[list[tuple[int, int]]], *, apart: bool) -> tuple[int, ...]:
    """Nanoseconds of each repetition on the slowest rank, from its own start. Where ranks arrive
    `apart`, they are from the last start to the last end, on the machine's one clock."""
    turns = zip(*ranks, strict=True)
    if apart:
        return tuple(max(end for _, end in turn) - max(turn)[0] for turn in turns)
    return tuple(max(end - start for start, end in turn) for turn in turns)


def timed(ranks: list[dict[str, list[list[int]]]]) -> tuple[RepeatedCall, ...]:
    """Times of each kernel or collective: on the device, and to issue it on the host."""
    device, issue = (slowest([rank[part] for rank in ranks]) for part in ("device", "issue"))
    return tuple(
        RepeatedCall(device=lasted, issue=issued)
        for lasted, issued in zip(device, issue, strict=True)
    )
