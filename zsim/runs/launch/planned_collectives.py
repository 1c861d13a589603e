"""Collectives as reports name them, and those that the Program has for a rank, by number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from zsim.ir.mesh import axis_of
from zsim.ir.ops import COLLECTIVES
from zsim.models.training_options import Device
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

BY_TORCH = "/torch/distributed/"
"""Part of the file of an error that torch raises, which may be of what another rank has sent."""
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
    """The Program's collectives of `scenario` on such a device; "" past its steps, of which a real
    run takes at least three."""
    program = cache(lambda: plan(scenario, device=device))
    repeats = max(3, scenario.steps) - 1

    @cache
    def texts(kind: int) -> list[str]:
        own = program().ranks[kind]
        ops = (*own.construction, *own.first, *own.second, *own.steady * repeats)
        return [
            collective_text(op.kind, op.nbytes, axis_of(op.group))  # ranks tell no part
            for op in ops if op.kind in COLLECTIVES
        ]

    def planned(rank: int, number: int) -> str:
        own = texts(program().assignment[rank])
        return own[number] if 0 <= number < len(own) else ""

    return planned


@dataclass(frozen=True, slots=True)
class Deviation:
    """The first collective of a rank that is another than the Program's, and the Program's."""

    issued: str
    planned: str


def deviations(issued: Mapping[int, Sequence[str]], planned: Planned) -> dict[int, Deviation]:
    """Deviations from the Program by rank, of the collectives that ranks have issued lately.

    Empty where all ranks deviate: then the Program may be wrong, and no rank can be told.
    """
    deviating = {}
    for rank, texts in issued.items():
        pairs = ((text, planned(rank, number_of(text))) for text in texts)
        other = (Deviation(*pair) for pair in pairs if pair[1] not in ("", without_number(pair[0])))
        if (first := next(other, None)) is not None:
            deviating[rank] = first
    return deviating if len(deviating) < len(issued) else {}
