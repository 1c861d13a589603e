"""RunRecord: what any backend recorded of a step, simulated or measured; `zsim.Run` shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zsim.errors import DeadlockError, RankError, ZsimError
from zsim.ir.mesh import Mesh

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
    """Time at which the host had issued it, when its memory was allocated and freed."""
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
    """Parts of a step, in order; each starts where the one before it ends."""

    @property
    def highest_by_part(self) -> dict[str, int]:
        """The highest peak of each part, over its micro-batches."""
        peaks: dict[str, int] = {}
        for part in self.parts:
            peaks[part.name] = max(part.peak_bytes, peaks.get(part.name, 0))
        return peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """Collectives and memory of one rank in one phase (construction, first, steady)."""

    collectives: tuple[CollectiveRecord, ...]
    memory: MemoryRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Loss per step, and the distance of the final parameters from the single-process reference,
    computed in `dtype`.

    The `largest_relative_difference` is that distance relative to how far training moved the
    reference: 1 is an untrained parameter. The `largest_gradient_difference` is the distance,
    relative to their size, of the optimizer's gradients in one more step from those of one process.
    Both start that step with the very same parameters, and 1 is a gradient that is not there.
    """

    losses: tuple[float, ...]
    largest_relative_difference: float
    largest_gradient_difference: float
    steps: int
    dtype: str = "float32"
    reference_losses: tuple[float, ...] = ()
    """Losses of the reference per step, as means over ranks."""
    initial_difference: float | None = None
    """Largest difference of an element that the optimizer steps from the model's own, before the
    first step; None where it was not measured."""
    furthest_parameter: str = ""
    """Fqn of the parameter with the largest relative difference, and in `furthest_gradient` that
    with the largest gradient difference; "" where it is not known."""
    furthest_gradient: str = ""
    step_difference: float | None = None
    """Largest difference of an element after one more step from where a new optimizer takes it,
    with the same state and gradients; None likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """Bytes in torch's caching allocator for CUDA over steady steps of one rank.

    `start_bytes` and `peak_bytes` are those asked for. All others are peaks of whole blocks:
    `allocated_bytes` in use by the host, `active_bytes` also those that a stream still uses,
    `reserved_bytes` all that torch has of the device.
    """

    start_bytes: int
    peak_bytes: int
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    releases: int = 0
    """Times that the device was full and cached memory was given back."""
    segments: int = 0
    """Contiguous pieces of reserved memory after the last step."""
    largest_free_bytes: int = 0
    """The largest block that is free then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffDevice:
    """Work of a rank's steady step off its device. Of each resource: nanoseconds in which such work
    runs and the device computes nothing. Of drives also the bytes that are read and written."""

    drives_ns: int = 0
    copies_ns: int = 0
    """Copies between device and host, over PCIe."""
    host_ns: int = 0
    """Steps of the optimizer, and what else the host does with offloaded states."""
    read_bytes: int = 0
    written_bytes: int = 0


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
    """Global ranks, in group order, of each group in which this rank was seen to communicate, by
    the mesh's names."""
    step_time_ns: int | None = None
    """Nanoseconds of a steady step by this rank's own clock, where one was timed; the Run's is the
    largest."""
    step_times_ns: tuple[int, ...] = ()
    """Nanoseconds of each timed step, whose median that is."""
    recorded_step_ns: int | None = None
    """Nanoseconds of the recorded step, whose spans these are, where it is none of the timed ones.
    """
    recorded_at_ns: int | None = None
    """Beginning of that step by the clock of the rank's machine, on a CPU."""
    recorded_times_ns: tuple[int, ...] = ()
    """Nanoseconds of each step that was recorded: what recording costs beside `step_times_ns`."""
    cache: CacheRecord | None = None
    """The caching allocator of the rank's GPU; None on a CPU."""
    off_device: OffDevice | None = None
    """Work of a simulated step off the device; None where that is none, or not known."""
    others_share: float | None = None
    """Share of the machine's cores that work other than the run's took while steps were timed; None
    where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """A rank that came last to `last_at` of its `collectives` and held them up for `held_up_ns` in
    all."""

    rank: int
    last_at: int
    collectives: int
    held_up_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopRecord:
    """A chunk's way from a rank to the next of its ring, in one step of the collective called
    `name`. Times are as those of spans; of them `lost_ns` went to other rings on shared links."""

    name: str
    group: str
    step: int
    source: int
    destination: int
    link: str
    """The kind of the narrowest link: fabric, pcie or rail."""
    start_ns: int
    end_ns: int
    lost_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The result of one scenario on one backend. The same type from the simulator and from a
    cluster of GPUs.

    Its provenance names, among other things, the scenario (`fingerprint`) and, if a backend has
    observed only some ranks, those (`ranks`).
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
    """Shown rank that did the same, rank by rank; empty where each shown rank speaks for itself
    alone."""
    complete: bool = True
    failure: str = ""
    """Reason why the Run is not complete; its ranks then hold the phases that they had ended."""
    faults: tuple[str, ...] = ()
    """Faults of the scenario that the step had; its times are no clean step's."""
    late: tuple[LateRank, ...] = ()
    """Ranks that held collectives up, by time of arrival, in a step with faults: simulated, or
    recorded by real ranks on one machine."""
    hops: tuple[HopRecord, ...] = ()
    """Hops of chunks round rings that were simulated as steps, where a trace was asked for."""
    provenance: Mapping[str, str] = field(default_factory=dict)


def both_simulated(predicted: RunRecord, measured: RunRecord) -> bool:
    """True where neither of two Runs was measured."""
    return {predicted.interpreter, measured.interpreter} == {"simulator"}


def sees(run: RunRecord, aspect: str) -> bool:
    """True if the Run's backend declares that it sees `aspect` (memory, numerics, time); a Run
    without a declaration sees all."""
    return aspect in run.provenance.get("sees", aspect).split()


def band_of(run: RunRecord) -> tuple[float, float] | None:
    """The factors of the step time between which its backend expects the true one; None where it
    gave none that mean anything."""
    low, _, high = run.provenance.get("band", "").partition(" ")
    try:
        factors = float(low), float(high)
    except ValueError:  # a saved Run that was edited by hand
        return None
    return factors if 0 < factors[0] <= 1 <= factors[1] < 1e3 else None


def observed_ranks(ranks: Iterable[int]) -> dict[str, str]:
    """The provenance of a Run that shows some ranks only."""
    return {"ranks": " ".join(map(str, ranks))}


def ranks_at_fault(run: RunRecord) -> tuple[int, ...]:
    """The ranks that the failure of a Run names in front; () where it names none."""
    named = re.match(r"ranks? (\d+(?:, \d+)*)\b", run.failure)
    return tuple(map(int, named[1].split(", "))) if named else ()


class _KeptRunError(ZsimError):
    """An error with the Run until then: `run` holds the phases that ranks had ended, marked
    incomplete."""

    def __init__(self, error: ZsimError, run: RunRecord) -> None:
        super().__init__(
            where=error.where, expected=error.expected, found=error.found, remedy=error.remedy
        )
        self.run = run


class IncompleteRunError(_KeptRunError, RankError):
    """A real run in which a rank failed."""


class UnendedRunError(_KeptRunError, DeadlockError):
    """A simulated run whose steady step cannot end, because of its faults."""


class InterruptedRunError(KeyboardInterrupt):
    """A real run that Ctrl-C or SIGTERM ended, which is its cause; `run` holds what ranks had ended
    by then, marked incomplete, and is None where that is nothing."""

    def __init__(self, run: RunRecord | None) -> None:
        super().__init__()
        self.run = run
