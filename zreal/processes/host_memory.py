"""Host memory that a real run needs, checked before it starts: a message instead of a kill."""

from __future__ import annotations

import os
from pathlib import Path

from zreal.processes.reference_cost import num_references, reference_cost
from zsim.errors import BackendUnavailableError
from zsim.io.units import format_bytes
from zsim.ir.ledger_replay import replay
from zsim.ir.program import PHASES
from zsim.models.training_options import Device
from zsim.runs.modes import NumericsMode
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

PROCESS_NBYTES = 400 * 1024**2
"""Bytes of a rank before it has a model: an interpreter with torch, partly shared among forks."""
DRAWN_NBYTES = 12
"""Bytes per element of an initial value: the random numbers, those scaled, and a copy."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_nbytes() -> int:
    """Bytes that this machine can still give, or the container or job around this process.

    Half of the machine's memory where it does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        machine = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError):
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([machine, *_left_in_cgroups()])


def _left_in_cgroups() -> list[int]:
    """Bytes left in this process's cgroup and in each around it that has a limit; containers and
    Slurm's jobs are cgroups."""
    try:
        line = OWN_CGROUP.read_text(encoding="utf-8").splitlines()[-1]
    except (OSError, IndexError):
        return []
    own = CGROUPS / line.rpartition(":")[2].lstrip("/")
    left = []
    for group in (own, *own.parents):
        if group.is_relative_to(CGROUPS):
            try:
                limit, used = (
                    int((group / name).read_text(encoding="ascii"))
                    for name in ("memory.max", "memory.current")
                )
                cached = dict(
                    entry.split()
                    for entry in (group / "memory.stat").read_text(encoding="ascii").splitlines()
                )
                left.append(max(0, limit - used + int(cached.get("inactive_file", 0))))
            except (OSError, ValueError):  # none, "max", or another version of cgroups
                continue
    return left


def needed_nbytes(
    scenario: Scenario, *, processes: int, numerics: NumericsMode = "none", device: Device = "cpu"
) -> int:
    """Bytes of host memory for `processes` ranks at once: each has the highest predicted peak, or
    after training what numerics need, whichever is more.

    On CUDA the host holds a parameter at a time, which moves to the device, or a user's own module
    that is built whole.
    """
    model = scenario.model
    whole = 4 * sum(p.numel for p in model.parameters)
    largest = max((p.numel for p in model.parameters), default=0)
    peak = whole if model.made_whole else DRAWN_NBYTES * largest
    rest = 0
    if device == "cpu":
        program = plan(scenario, device="cpu")
        phases = [replay(rank, timeline=False)[phase] for rank in program.ranks for phase in PHASES]
        peak = max(phase.peak_bytes for phase in phases)
        rest = max(phase.end_bytes for phase in phases)
    cost, references = reference_cost(scenario, device=device), num_references(numerics, processes)
    gathered = rest + cost.gathered_nbytes if references else 0
    return (
        references * max(peak, gathered + cost.nbytes)
        + (processes - references) * max(peak, gathered)
        + processes * PROCESS_NBYTES
    )


def require_host_memory(
    scenario: Scenario, *, backend: str, processes: int, numerics: NumericsMode = "none",
    device: Device = "cpu",
) -> None:
    """BackendUnavailableError where the run needs more memory than this machine has left."""
    needed = needed_nbytes(scenario, processes=processes, numerics=numerics, device=device)
    available = available_nbytes()
    if needed > available:
        fewer = "fewer layers (model.num_layers), a smaller batch, or the backend sim"
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected=f"about {format_bytes(needed)} of memory for {scenario.name}",
            found=f"{format_bytes(available)} on this machine",
            remedy=f"take {fewer}" if numerics == "none" else f"take --numerics none, or {fewer}",
        )


def require_device_memory(scenario: Scenario, *, backend: str, present_nbytes: int) -> None:
    """BackendUnavailableError where a rank allocates more than a GPU of `present_nbytes` has."""
    program = plan(scenario, device="cuda")
    needed = max(
        replay(rank, timeline=False)[phase].peak_bytes for rank in program.ranks for phase in PHASES
    )
    if needed > present_nbytes:
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected=f"at least {format_bytes(needed)} of device memory, which a rank of "
            f"{scenario.name} allocates",
            found=f"{format_bytes(present_nbytes)} on this machine's GPU",
            remedy="shard over more ranks, checkpoint activations, or take a smaller batch; `zsim "
            "show --memory` says what would help",
        )
