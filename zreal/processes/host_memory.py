"""Whether a real run fits into this machine's memory, asked before it starts: a killed machine says
less than a sentence."""

from __future__ import annotations

import os
from pathlib import Path

from zsim.errors import BackendUnavailableError
from zsim.io.units import format_bytes
from zsim.ir.ledger import replay
from zsim.ir.program import PHASES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

PROCESS_NBYTES = 400 * 1024**2
"""What a rank takes before it has a model: an interpreter with torch, of which forked ranks share a
part."""

REFERENCE_COPIES = 5
"""float32 copies of the parameters that the single-process reference holds: model, gradients, two
states, one rounded."""


def available_nbytes() -> int:
    """Bytes that this machine can still give; where it does not say, half of what it has."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def needed_nbytes(scenario: Scenario, *, processes: int, parity: bool) -> int:
    """Bytes that a run of `processes` ranks at once takes: each the highest predicted peak and,
    with `parity`, a reference."""
    program = plan(scenario, device="cpu")
    peak = max(
        replay(rank, timeline=False)[phase].peak_bytes for rank in program.ranks for phase in PHASES
    )
    reference = REFERENCE_COPIES * 4 * scenario.model.num_parameters if parity else 0
    return processes * (max(peak, reference) + PROCESS_NBYTES)


def require_room(scenario: Scenario, *, backend: str, processes: int, parity: bool) -> None:
    """BackendUnavailableError when the run needs more memory than this machine has left."""
    needed, available = (
        needed_nbytes(scenario, processes=processes, parity=parity), available_nbytes(),
    )
    if needed > available:
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected=f"about {format_bytes(needed)} of memory for {scenario.name}",
            found=f"{format_bytes(available)} on this machine",
            remedy="take fewer layers (model.num_layers), a smaller batch, or --backend sim",
        )
