"""Run: what any backend returns, simulated or measured; and the Backend protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zsim.errors import RankError
from zsim.ir.mesh import Mesh

if TYPE_CHECKING:
    pass

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective as issued: c10d payload bytes, mesh axis it ran over ("world" for all), group
    size, a broadcast's group-local root."""

    op: str
    nbytes: int
    group: str
    group_size: int
    root: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One op on one stream. Times are ns since the start of the steady step; `group` is a
    collective's, as the mesh names it."""

    name: str
    kind: str
    unit: str
    stream: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    issued_ns: int = 0
    """When the host had issued it, which is when its memory was allocated and freed."""
    group: str = ""


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Allocated bytes of one part of a step: forward or backward of a micro-batch, optimizer,
    zero_grad."""

    name: str
    micro_batch: int
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Allocated bytes of one phase on one rank. `by_kind` is the split at the peak (empty if the
    meter cannot see kinds)."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    peak_at: str = ""
    by_kind: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parameters, gradients and optimizer_states when the optimizer has stepped and
    gradients still live."""
    timeline: tuple[tuple[str, int], ...] = ()
    """(op label, allocated bytes after it), for reading and plotting; may be empty."""
    parts: tuple[PartRecord, ...] = ()
    """Of a step, in order; each starts where the one before it ends."""

    @property
    def highest_by_part(self) -> dict[str, int]:
        """The highest peak of each part, over its micro-batches."""
        peaks: dict[str, int] = {}
        for part in self.parts:
            peaks[part.name] = max(part.peak_bytes, peaks.get(part.name, 0))
        return peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """What one rank did in one phase (construction, first, steady)."""

    collectives: tuple[CollectiveRecord, ...]
    memory: MemoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Loss per step, and how far parameters end up from the single-process reference, computing in
    `dtype`.

    `largest_relative_difference` is that distance relative to how far training moved the reference:
    1 is an untrained parameter. `largest_gradient_difference` is how far the optimizer's gradients
    of one more step are from those of one process with the very same parameters, relative to their
    size: 1 is a gradient that is not there.
    """

    losses: tuple[float, ...]
    largest_relative_difference: float
    largest_gradient_difference: float
    steps: int
    dtype: str = "float32"
    reference_losses: tuple[float, ...] = ()
    """The reference's, which are means over ranks."""
    initial_difference: float | None = None
    """How far any element of what the optimizer steps was from the model's own before the first
    step; None where nobody looked."""
    furthest_parameter: str = ""
    """Whose largest relative difference it is, and below whose gradient's; "" where nobody says."""
    furthest_gradient: str = ""
    step_difference: float | None = None
    """How far one more step took any element from where a new optimizer takes it from the same
    state and gradients; None likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """One rank, or, when folded, the first of `stands_for` ranks that are alike; `bytes_sent` is
    then the most that one of them sends."""

    rank: int
    stands_for: int = 1
    phases: Mapping[str, PhaseRecord]
    spans: tuple[Span, ...] = ()
    bytes_sent: int = 0
    numerics: Numerics | None = None
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, as the mesh names groups: the global ranks of each group that this rank was seen to
    communicate in, in group order."""
    step_time_ns: int | None = None
    """What a steady step took on this rank by its own clock, where one was timed; the Run's is the
    largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of one scenario on one backend. The same type from the simulator and from a
    cluster of GPUs.

    Its provenance says, among other things, which scenario it was (`fingerprint`) and, where not
    all ranks were observed, which (`ranks`).
    """

    scenario: str
    backend: str
    interpreter: str
    """"simulator", "executor" or "observer"."""
    world_size: int
    ranks: tuple[RankRun, ...]
    mesh: Mesh
    step_time_ns: int | None = None
    representatives: tuple[int, ...] = ()
    """By rank: the shown rank that did the same; empty where each shown rank speaks for itself
    alone."""
    complete: bool = True
    failure: str = ""
    """Why the Run is not complete; its ranks then hold the phases that they had ended."""
    provenance: Mapping[str, str] = field(default_factory=dict)


def sees(run: Run, what: str) -> bool:
    """Whether the Run's backend says it sees `what` (memory, numerics, time); a Run that says
    nothing sees all."""
    return what in run.provenance.get("sees", what).split()


def band_of(run: Run) -> tuple[float, float] | None:
    """The factors of the step time between which its backend expects the true one; None where it
    gave none that mean anything."""
    low, _, high = run.provenance.get("band", "").partition(" ")
    try:
        factors = float(low), float(high)
    except ValueError:  # a saved Run that somebody has edited
        return None
    return factors if 0 < factors[0] <= 1 <= factors[1] < 1e3 else None


def observed_ranks(ranks: Iterable[int]) -> dict[str, str]:
    """The provenance of a Run that shows some ranks only."""
    return {"ranks": " ".join(map(str, ranks))}


class IncompleteRunError(RankError):
    """A real run in which a rank failed; `run` holds what all ranks had ended by then, marked
    incomplete."""

    def __init__(self, error: RankError, run: Run) -> None:
        super().__init__(
            where=error.where, expected=error.expected, found=error.found, remedy=error.remedy
        )
        self.run = run
