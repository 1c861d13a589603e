"""What a nearly full device does to a step's time: it runs longer than its kernels say, by nobody
knows how much.

The allocator then frees what it has cached and asks the driver again, which waits for the device.
Published rows whose sharded states fill two fifths of the device or more ran slower than physics
says; none of ours do, so there is a width and no factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zsim.io.units import format_bytes
from zsim.ir.ledger import HELD, Ledger, replay
from zsim.ir.program import Program, RankProgram
from zsim.scenario.scenario import Scenario

STATES = 0.4
"""Of a device's memory in parameters, gradients and optimizer states: from here on rows of
llm-foundry ran slower."""
PEAK = 0.9
"""Of it in all that is allocated at once: what is cached in pieces, and the driver's part, leave
nothing of the rest."""
LONGER = 0.2
"""How much more time such a step may take: the rarest outliers among identical runs of llm-foundry
are 5 to 20 % off."""
NOT_AS_MAPPED = 0.3
"""How far off a step may be that cannot have run as it is mapped: as one from constants that are
all assumed (`bands.COMPUTE`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """A caution, and by how much it widens a band on both sides, and on the upper side alone."""

    words: str
    wider: float
    longer: float


def cautions(program: Program, asked: Scenario) -> tuple[Caution, ...]:
    """What to know of a step whose device is nearly full, or has less than it needs: no allocator
    could make that fit."""
    return tuple(found(program, asked.cluster.device.memory))


def found(program: Program, memory: int) -> Iterator[Caution]:
    """`cautions` of a device with so many bytes."""
    most, held = max(map(needed, program.ranks)), max(map(most_held, program.ranks))
    if most > memory:
        words = (
            f"as mapped it cannot fit: {format_bytes(most)} are allocated at once on "
            f"{format_bytes(memory)}"
        )
        yield Caution(words=words, wider=NOT_AS_MAPPED, longer=NOT_AS_MAPPED)
        return
    if most >= PEAK * memory:
        words = (
            f"near out of memory: {100 * most / memory:.0f} % of the device are allocated at once"
        )
        yield Caution(words=words, wider=0.0, longer=LONGER)
    if held >= STATES * memory:
        share = f"{100 * held / memory:.0f} % of the device's memory"
        words = f"parameters, gradients and optimizer states fill {share}: such steps run longer"
        yield Caution(words=words, wider=0.0, longer=LONGER)


def needed(rank: RankProgram) -> int:
    """The most bytes that are allocated at once in a steady step."""
    return replay(rank, timeline=False)["steady"].peak_bytes


def most_held(rank: RankProgram) -> int:
    """The most bytes of parameters, gradients and optimizer states that a rank holds at once in a
    steady step, as it shards them."""
    ledger, most = Ledger(), 0
    for op in (*rank.construction, *rank.first, *rank.second):
        ledger.apply(op)
    for op in rank.steady:
        ledger.apply(op)
        most = max(most, sum(ledger.by_kind[kind] for kind in HELD))
    return most
