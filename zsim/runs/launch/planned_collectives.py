"""Collectives as reports name them, and those that the Program has for a rank, by number."""

from __future__ import annotations

import re
from collections.abc import Callable

from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import SECTIONS
from zsim.models.training_options import Device
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

Planned = Callable[[int, int], str]
"""The collective that a rank should issue as a number of its run, as text without the number; ""
where that is not known."""


def collective_text(op: str, nbytes: int, axis: str) -> str:
    """A collective as reports name it; `op` may have its number: all_gather #3 of 64 B over …"""
    return f"{op} of {nbytes:,} B over {axis}"


def number_of(collective: str) -> int:
    """The number in a collective's text: 3 of "all_gather #3 of …", -1 where there is none."""
    number = re.search(r"#(\d+)", collective)
    return int(number[1]) if number else -1


def without_number(collective: str) -> str:
    """The collective as any rank announces it, at whatever number: "all_gather of 64 B over …"."""
    return re.sub(r" #\d+", "", collective)


def planned_collectives(scenario: Scenario, device: Device) -> Planned:
    """The Program's collectives of `scenario` on such a device; "" past its steps."""

    def planned(rank: int, number: int) -> str:
        program = plan(scenario, device=device).of_rank(rank)
        ops = [
            op for phase in SECTIONS for op in program.phase(phase) if op.kind in COLLECTIVES
        ]
        if not 0 <= number < len(ops):
            return ""
        return collective_text(ops[number].kind, ops[number].nbytes, ops[number].group)

    return planned
