"""Choice of the ranks that train a single-process reference for numerics: all, rank 0 alone or
none, as bytes and time allow."""

from __future__ import annotations

from dataclasses import dataclass

from zreal.processes.host_memory import available_nbytes, needed_nbytes, require_host_memory
from zreal.processes.reference_cost import available_cores, num_references, reference_cost
from zsim.io.units import counted, format_bytes
from zsim.models.training_options import Device
from zsim.runs.modes import NUMERICS_MODES, NumericsMode
from zsim.scenario.scenario import Scenario

SHARE_OF_TIMEOUT = 0.5
"""Most of a run's timeout that the reference may take, by the estimate."""
SAMPLED = "rank 0's, and the bits of all other ranks' parameters and gradients are those of rank 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsChoice:
    """The mode, and the reason for none."""

    mode: NumericsMode
    reason: str = ""

    @property
    def provenance(self) -> dict[str, str]:
        """The entry of a Run's provenance, which the check of numerics reads; none for full."""
        if self.mode == "full":
            return {}
        text = SAMPLED if self.mode == "sampled" else self.reason
        return {"numerics": f"{self.mode}: {text}"}


def choose_numerics(
    scenario: Scenario,
    *,
    requested: NumericsMode | None,
    backend: str,
    processes: int,
    timeout_s: float,
    device: Device,
) -> NumericsChoice:
    """The mode `requested` for, else the fullest that fits this machine's memory and the timeout.

    `processes`: ranks on this machine. BackendUnavailableError, before anything is built, for a
    run that does not fit, with the bytes needed and available.
    """
    mode: NumericsMode = requested or "none"
    reason = "not asked for (--numerics none)"
    if requested is None:
        problems = {
            each: _problem(scenario, each, processes=processes, timeout_s=timeout_s, device=device)
            for each in NUMERICS_MODES
        }
        mode = next(each for each in NUMERICS_MODES if not problems[each])
        reason = problems["sampled"]
    require_host_memory(
        scenario, backend=backend, processes=processes, numerics=mode, device=device
    )
    return NumericsChoice(mode=mode, reason=reason if mode == "none" else "")


def _problem(
    scenario: Scenario, mode: NumericsMode, *, processes: int, timeout_s: float, device: Device
) -> str:
    """The bytes or seconds that the reference needs and has not, as text; "" where it fits."""
    references = num_references(mode, processes)
    if not references:
        return ""
    cores = available_cores() / references
    cost = reference_cost(
        scenario, cores=min(cores, 1.0) if mode == "full" else cores, device=device
    )
    needed = needed_nbytes(scenario, processes=processes, numerics=mode, device=device)
    available, limit_s = available_nbytes(), SHARE_OF_TIMEOUT * timeout_s
    if needed <= available and cost.seconds <= limit_s:
        return ""
    model = counted(scenario.model.num_parameters, "parameter")
    return (
        f"a single-process reference of {model} needs about {format_bytes(needed)} of this "
        f"machine's {format_bytes(available)} and {_duration(cost.seconds)}, of which --timeout "
        f"allows {_duration(limit_s)}"
    )


def _duration(seconds: float) -> str:
    """Seconds as text, to one digit after the point."""
    for unit, factor in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:,.1f} {unit}"
    return f"{seconds:.1f} s"
