"""Figures of a Run's steady step: time, exposed communication, MFU, traffic, peaks. Reads Runs;
knows no engine.

Communication is exposed while a collective runs and the compute stream does not. MFU and HFU are
model and hardware FLOPs (`zsim.scenario.flops`) over the peak of the dtype of products.

A simulated step has an HFU of at most 1, as no kernel is faster than the peak; with float8 products
may be. MFU has no such bound. It is at most HFU where attention is explicit or not causal. Fused
causal attention does 7 products of half the scores, where PaLM counts 6 of all. Then MFU is at most
12 / 7 of HFU, or twice HFU where frozen attention has no backward. So it may exceed 1 where
sequences are long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zsim.io.read_only import ReadOnly
from zsim.ir.ops import COLLECTIVES, MEMORY_KINDS
from zsim.ir.run import OffDevice, RankRun, RunRecord, Span, band_of
from zsim.runs.figures.intervals import TimeInterval, length_of, union_of
from zsim.runs.figures.off_device import largest
from zsim.scenario.flops import hardware_flops, model_flops
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Number and total payload bytes of the collectives of a kind that a rank issues in a step."""

    count: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of the steady step: times and peaks are the largest of any rank.

    Times are None where the backend sees no time, and so are MFU and HFU, as on a device that is
    not the scenario's.
    """

    step_time_ns: int | None
    step_time_band_ns: tuple[int, int] | None
    compute_ns: int | None
    communication_ns: int | None
    exposed_communication_ns: int | None
    exposed_share: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    hfu: float | None
    bytes_sent_per_rank: int | None
    collectives: ReadOnly[str, Traffic]
    peak_memory_bytes: int
    peak_first_step_bytes: int
    peak_memory_by_kind: ReadOnly[str, int | None]
    peak_memory_by_part: ReadOnly[str, int]
    """The highest peak of each part of the step (forward, backward, optimizer, zero_grad) on the
    rank that peaks highest."""
    device_memory_bytes: int | None = None
    """Memory of the scenario's device; None where the Run was on another kind of device."""
    off_device: OffDevice | None = None
    """Work of a simulated step off the device, each figure of the rank that has most of it; None
    where that is none."""


def band_ns(time: int, factors: tuple[float, float] | None) -> tuple[int, int]:
    """The band of a step time in nanoseconds, by the backend's factors; a measured time is its own
    band."""
    low, high = factors or (1.0, 1.0)
    return round(time * low), round(time * high)


def figures(run: RunRecord, scenario: Scenario) -> Figures:
    """Every figure of `run`, which is of `scenario`."""
    steady = max(run.ranks, key=lambda rank: (rank.phases["steady"].memory.peak_bytes, -rank.rank))
    time = run.step_time_ns
    distinct = {id(rank.spans): rank for rank in run.ranks}.values()
    # a Run that was only timed says nothing of what made its time
    spans = time is not None and any(rank.spans for rank in distinct)
    exposed = _largest(map(exposed_ns, distinct)) if spans else None
    shares = [exposed_ns(rank) / (rank.recorded_step_ns or time) for rank in distinct if time]
    memory = steady.phases["steady"].memory
    own = run.provenance.get("device") == scenario.cluster.kind
    return Figures(
        step_time_ns=time, step_time_band_ns=band_ns(time, band_of(run)) if time else None,
        compute_ns=_largest(map(compute_ns, distinct)) if spans else None,
        communication_ns=_largest(map(communication_ns, distinct)) if spans else None,
        exposed_communication_ns=exposed,
        exposed_share=max(shares) if spans else None,
        tokens_per_second_per_gpu=tokens(scenario) * 1e9 / time if time else None,
        mfu=_utilization(model_flops(scenario), scenario, time) if own and time else None,
        hfu=_utilization(hardware_flops(scenario), scenario, time) if own and time else None,
        bytes_sent_per_rank=_bytes_sent(run),
        collectives=ReadOnly(traffic(run.ranks[0])),
        peak_memory_bytes=memory.peak_bytes,
        peak_first_step_bytes=max(rank.phases["first"].memory.peak_bytes for rank in run.ranks),
        peak_memory_by_kind=ReadOnly({
            kind: memory.by_kind.get(kind, 0) if memory.by_kind else None for kind in MEMORY_KINDS
        }),
        peak_memory_by_part=ReadOnly(memory.highest_by_part),
        device_memory_bytes=scenario.cluster.device.memory if own else None,
        off_device=largest(rank.off_device for rank in run.ranks),
    )


def tokens(scenario: Scenario) -> int:
    """Tokens that one rank trains on in a step."""
    batch = scenario.batch
    return batch.micro_batch * batch.sequence_length * batch.accumulation * batch.forwards


def traffic(rank: RankRun) -> Mapping[str, Traffic]:
    """Collectives of `rank`'s steady step by kind."""
    records = rank.phases["steady"].collectives
    by_kind = {}
    for kind in sorted(COLLECTIVES):
        sizes = [record.nbytes for record in records if record.op == kind]
        if sizes:
            by_kind[kind] = Traffic(count=len(sizes), bytes=sum(sizes))
    return by_kind


def _bytes_sent(run: RunRecord) -> int | None:
    """The most that any rank puts on the wire; None where collectives were seen but no wire was."""
    most = max(rank.bytes_sent for rank in run.ranks)
    return most if most or not traffic(run.ranks[0]) else None


def _largest(values: Iterable[int]) -> int:
    return max(values, default=0)


def _utilization(flops: int, scenario: Scenario, time: int) -> float:
    """`flops` over those of the peak in the dtype of products, TF32 for those of float32 in it.
    With float8 that is the scenario's own, as no product has to be in 8 bits."""
    dtype: str = scenario.precision.products
    if dtype == "float32" and scenario.execution.float32_products == "tf32":
        dtype = "tf32"
    return flops * 1e9 / (time * scenario.cluster.device.peak_flops(dtype))


def _union(spans: Iterable[Span]) -> list[TimeInterval]:
    """Disjoint intervals that cover the spans, in order."""
    return union_of((span.start_ns, span.end_ns) for span in spans)


def compute_ns(rank: RankRun) -> int:
    """Time in which the compute stream of `rank` is busy."""
    return length_of(_union(span for span in rank.spans if span.stream == "compute"))


def communication_ns(rank: RankRun) -> int:
    """Time in which some collective of `rank` runs."""
    return length_of(_union(span for span in rank.spans if span.kind in COLLECTIVES))


def exposed_ns(rank: RankRun) -> int:
    """Time in which some collective of `rank` runs and its compute stream is idle."""
    busy = [span for span in rank.spans if span.stream == "compute"]
    moving = [span for span in rank.spans if span.kind in COLLECTIVES]
    return length_of(_union([*busy, *moving])) - length_of(_union(busy))
