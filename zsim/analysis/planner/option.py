"""An option of a plan: a candidate with its figures, and the one reason why it is not taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from zsim.io.quantities import Duration
from zsim.io.units import format_bytes
from zsim.memory.fits import MemoryVerdict
from zsim.runs.figures import metrics
from zsim.scenario.scenario import Scenario
from zsim.scenario.tables import seen_from, to_toml

DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Option:
    """A way to train: its scenario, what a rank needs, and how long a step of the global batch
    takes. `reason` speaks against it; "" for the one to take. `dropped` and `instead` are options
    as of `zsim.analysis.fit.fit_table.Candidate`."""

    name: str
    way: str
    """Strategy and checkpointing, as `zsim fit` names them."""
    scenario: Scenario
    memory: MemoryVerdict = field(hash=False)
    step_time_ns: int
    step_time_band_ns: tuple[int, int]
    reason: str = ""
    dropped: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """The number of ranks."""
        return self.scenario.world_size

    @property
    def step_time(self) -> Duration:
        """The step's time, with its band."""
        return Duration(self.step_time_ns, self.step_time_band_ns)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all ranks train on in a second."""
        return self._per_s(self.step_time_ns)

    def _per_s(self, step_ns: int) -> float:
        return metrics.tokens(self.scenario) * self.gpus * 1e9 / max(1, step_ns)

    def days(self, tokens: float) -> tuple[float, float, float]:
        """Days for so many tokens, and the band's ends, without restarts and checkpoints."""
        low, high = self.step_time_band_ns
        middle, least, most = (
            tokens / self._per_s(ns) / DAY_S for ns in (self.step_time_ns, low, high)
        )
        return middle, least, most

    def gpu_hours(self, tokens: float) -> float:
        """Hours of a GPU, summed over all, for so many tokens."""
        return self.days(tokens)[0] * 24 * self.gpus

    def to_toml(self, *, folder: str | PathLike[str] | None = None) -> str:
        """The scenario as a file in `folder`, by default beside the scenario that was planned,
        without what that one was expected to do."""
        kept = {
            name: table for name, table in self.scenario.to_dict().items()
            if name not in ("expect", "description") and table != {}
        }
        return to_toml(seen_from(folder, kept, self.scenario.folder))

    def to_dict(self) -> dict[str, Any]:
        """The option as `zsim plan --json` prints it."""
        return {
            "name": self.name, "way": self.way, "gpus": self.gpus,
            "micro_batch": self.scenario.batch.micro_batch,
            "accumulation": self.scenario.batch.accumulation, "verdict": self.memory.verdict,
            "needed_bytes": self.memory.needed.nbytes,
            "capacity_bytes": self.memory.capacity.nbytes, "step_time_ns": self.step_time_ns,
            "step_time_band_ns": list(self.step_time_band_ns),
            "tokens_per_s": round(self.tokens_per_s), "reason": self.reason,
            "dropped": list(self.dropped), "instead": list(self.instead),
            "scenario": self.scenario.to_dict(),
        }

    def __repr__(self) -> str:
        return (
            f"<{self.name}: {self.memory.verdict}, needs "
            f"{format_bytes(self.memory.needed.nbytes)}, step {self.step_time}>"
        )


def dominates(option: Option, other: Option) -> bool:
    """True where `option` fits, and is no worse than `other` in GPUs, bytes and time, and better in
    some."""
    left = (option.gpus, option.memory.needed.nbytes, option.step_time_ns)
    right = (other.gpus, other.memory.needed.nbytes, other.step_time_ns)
    return (
        option.memory.verdict == "FITS"
        and all(a <= b for a, b in zip(left, right, strict=True)) and left != right
    )
