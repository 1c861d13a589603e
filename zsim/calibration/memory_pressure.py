"""Rows of steps on a nearly full device, as the replay of torch's allocator on it has them.

A step that gives cached memory back has the driver's calls in its time, and what is not known of
them in its band.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import Caveat
from zsim.io.units import format_bytes
from zsim.ir.program import Program
from zsim.memory.fits import MemoryVerdict, assess
from zsim.memory.full_device import standings_if_full, with_calls
from zsim.scenario.plan import Planned
from zsim.scenario.scenario import Scenario


def pressed(scenario: Scenario, program: Program) -> tuple[Program, tuple[Caveat, ...]]:
    """`program` with the driver's calls of its steady step, and the caveats of its memory."""
    ranks = standings_if_full(program, scenario.cluster)
    if not ranks:
        return program, ()
    case = Planned(scenario, program)
    verdict = assess(case, ranks=ranks)
    return with_calls(case, verdict).program, tuple(caveats(verdict))


def caveats(verdict: MemoryVerdict) -> Iterator[Caveat]:
    """Caveats of a step that is not sure to have room."""
    if verdict.verdict == "FITS":
        return
    needed = f"{format_bytes(verdict.needed.nbytes)} of {format_bytes(verdict.capacity.nbytes)}"
    if verdict.releases_per_step is None:
        yield Caveat(f"the scenario does not fit: it needs {needed}")
    elif verdict.releases_per_step:
        yield Caveat(f"the device is full, {verdict.running}: it needs {needed}")
    else:
        text = "the device is nearly full and may have to give cached memory back"
        yield Caveat(f"{text}: it needs {needed}")
