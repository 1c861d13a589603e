"""Caveats of a nearly full device: its step runs longer than its kernels say.

The allocator then frees its cache and asks the driver again, which waits for the device. Published
rows whose sharded states fill two fifths of the device or more ran slower than physics says. None
of ours do, so there is a width and no factor.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.cluster.cluster import ClusterSpec
from zsim.errors import Caveat
from zsim.io.units import format_bytes
from zsim.ir.ledger import Ledger
from zsim.ir.ledger_replay import HELD, replay
from zsim.ir.program import Program, RankProgram

STATES = 0.4
"""Share of a device's memory in parameters, gradients and optimizer states from which on rows of
llm-foundry ran slower."""
PEAK = 0.9
"""Share of a device's memory in allocated bytes that leaves none free: cached pieces and the driver
take the rest."""
LONGER = 0.2
"""Share by which such a step may take longer: the rarest outliers among identical runs of
llm-foundry are 5 to 20 % off."""
DOES_NOT_FIT = 0.3
"""Half-width of a step that cannot have run as its scenario says, as if all constants were assumed
(`error_bands.COMPUTE`)."""


def caveats(program: Program, cluster: ClusterSpec) -> tuple[Caveat, ...]:
    """Caveats of a step whose device is nearly full, or has less than the step needs."""
    return tuple(of_device(program, cluster.device.memory))


def of_device(program: Program, memory: int) -> Iterator[Caveat]:
    """`caveats` on a device of so many bytes."""
    most, held = max(map(needed, program.ranks)), max(map(most_held, program.ranks))
    if most > memory:
        text = (
            f"the scenario does not fit: {format_bytes(most)} are allocated at once on "
            f"{format_bytes(memory)}"
        )
        yield Caveat(text, widens=DOES_NOT_FIT)
        return
    if most >= PEAK * memory:
        text = (
            f"near out of memory: {100 * most / memory:.0f} % of the device are allocated at once"
        )
        yield Caveat(text, longer=LONGER)
    if held >= STATES * memory:
        share = f"{100 * held / memory:.0f} % of the device's memory"
        yield Caveat(
            f"parameters, gradients and optimizer states fill {share}: such steps run longer",
            longer=LONGER,
        )


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
