"""Host memory that a real run needs, checked before it starts: a message instead of a kill."""

from __future__ import annotations

import os
from pathlib import Path

from zsim.errors import BackendUnavailableError
from zsim.io.units import format_bytes
from zsim.ir.ledger_replay import replay
from zsim.ir.program import PHASES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

PROCESS_NBYTES = 400 * 1024**2
"""Bytes of a rank before it has a model: an interpreter with torch, partly shared among forks."""

REFERENCE_COPIES = 5
"""float32 copies of the parameters in the single-process reference: model, gradients, two optimizer
states, one rounded copy."""


def available_nbytes() -> int:
    """Bytes that this machine can still give; half of its memory where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def needed_nbytes(scenario: Scenario, *, processes: int, parity: bool) -> int:
    """Bytes of `processes` ranks at once, each with the highest predicted peak, or with the
    reference where `parity` makes it larger."""
    program = plan(scenario, device="cpu")
    peak = max(
        replay(rank, timeline=False)[phase].peak_bytes for rank in program.ranks for phase in PHASES
    )
    reference = REFERENCE_COPIES * 4 * scenario.model.num_parameters if parity else 0
    return processes * (max(peak, reference) + PROCESS_NBYTES)


def require_host_memory(
    scenario: Scenario, *, backend: str, processes: int, parity: bool
) -> None:
    """BackendUnavailableError where the run needs more memory than this machine has left."""
    needed = needed_nbytes(scenario, processes=processes, parity=parity)
    available = available_nbytes()
    if needed > available:
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected=f"about {format_bytes(needed)} of memory for {scenario.name}",
            found=f"{format_bytes(available)} on this machine",
            remedy="take fewer layers (model.num_layers), a smaller batch, or the backend sim",
        )
