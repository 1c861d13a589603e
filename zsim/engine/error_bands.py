"""How far off a predicted time may be, from where the constants that it used come from.

A band is a pair of factors around the prediction in which we expect nine of ten measurements. A
step is made of compute, of communication that is exposed, and of time in which the device waits for
the host; each is as uncertain as the constants behind it, and counts with its share of the step.
Calibrated constants earn a narrow band by their error on rows that were left out of the fit, those
of a cluster's file by the errors of its own; whatever is assumed widens it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives import estimated
from zsim.cluster.devices import Figure
from zsim.engine import kernel_time as compute
from zsim.engine.costs import Costs
from zsim.engine.execution import EAGER, Execution
from zsim.engine.kernel_time import STREAMS
from zsim.engine.overlap import COMPUTE as COMPUTE_KINDS
from zsim.engine.timeline import Timeline, Times
from zsim.ir.ops import COLLECTIVES, Kernel, Op, is_attention
from zsim.ir.program import Program

COMPUTE: Mapping[str, float] = {
    "measured": 0.05,
    "calibrated": 0.08,
    "published": 0.15,
    "source code": 0.2,
    "vendor sheet": 0.3,
    "assumed": 0.3,
}
"""Half-width of a kernel's time by the provenance of the constant behind it. Calibrated: the 95th
percentile of errors on left-out groups of llm-foundry, 5 to 7 %, rounded up; published: what
llm-foundry's steps miss by with published priors alone, 9 %, and a source's own software on top;
assumed: carrying a fraction from one generation to the next was 18 % off, doubled for the 95th
percentile."""
CPU = 0.4
"""Of compute and links of CPUs that are assumed: published steps run up to 65 % longer than a
roofline of such figures says."""
LINKS: Mapping[str, float] = {"measured": 0.3, "calibrated": 0.1}
"""Of collectives that are not NCCL's, by the provenance of the link's bandwidth: gloo's floor moves
with the host's load."""
ASSUMED_LINK = 0.3
"""Of NCCL's collectives, beside what their curves are off, where the bandwidth of the link is
assumed: curves are of other machines."""
HOST = 0.5
"""What the host spends, and a trainer's pauses: assumed, and other processors differ by a factor of
two (gaps of 5 to 10 us a kernel)."""
SOFTWARE = 0.05
"""For compiled steps and for 8 bits: one row each to calibrate on. A generation of software moves
steps by 5 to 15 %."""
MOST = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A share of the step, and the half-width of the time that it takes."""

    share: float
    width: float

    @property
    def slower(self) -> float:
        """What it adds to the step at the upper end, where its rate is as far below the expected
        one as its time is at the lower end."""
        return self.share * self.width / (1 - min(MOST, self.width))

    @property
    def faster(self) -> float:
        """What it takes off the step at the lower end."""
        return self.share * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step's band is made of. `network` is communication that is exposed; `hidden` is the
    rest of it, which compute covers, `spare` the compute between the first collective and the last
    that covers none, and `issuing` the host's own time, all as shares of the step. `least` is the
    half-width of whole steps by a calibration on this machine, whose errors are not of kernels
    alone; 0 without one."""

    compute: Part
    network: Part
    host: Part
    hidden: float
    spare: float
    issuing: float = 0.0
    least: float = 0.0

    @property
    def longer(self) -> float:
        """What slower collectives add: what is exposed grows as it is, what was hidden comes out
        where no compute is left to hide it."""
        return self.network.faster + max(0.0, self.hidden * self.network.width - self.spare)

    @property
    def shorter(self) -> float:
        """What faster collectives take off at most: all that is exposed, if hidden ones make room
        for it."""
        return min(self.network.share, (self.network.share + self.hidden) * self.network.width)

    @property
    def later(self) -> float:
        """What a slower host adds: to what the device waits for it now, or where its own time,
        which was hidden, outgrows the step."""
        return max(self.host.slower, self.issuing / (1 - self.host.width) - 1)

    @property
    def factors(self) -> tuple[float, float]:
        """(low, high) around the predicted time. Parts are independent of one another, so their
        squares add up."""
        low = hypot(self.compute.faster, self.shorter, self.host.faster)
        high = hypot(self.compute.slower, self.longer, self.later)
        return self._whole(low, high)

    def _whole(self, low: float, high: float) -> tuple[float, float]:
        """The factors, no nearer than `least`."""
        least = Part(share=1.0, width=self.least)
        return 1 - min(MOST, max(low, least.faster)), 1 + max(high, least.slower)

    def on_shared_network(self, least: float, most: float) -> tuple[float, float]:
        """(low, high) where collectives may take from `least` to `most` times as long, since others
        use the network as well."""
        all_of_it = self.network.share + self.hidden
        shorter = max(self.shorter, min(self.network.share, all_of_it * (1 - least)))
        longer = max(
            self.longer,
            self.network.share * (most - 1) + max(0.0, self.hidden * (most - 1) - self.spare),
        )
        low = hypot(self.compute.faster, shorter, self.host.faster)
        return self._whole(low, hypot(self.compute.slower, longer, self.later))


def band(program: Program, timeline: Timeline, *, costs: Costs) -> tuple[float, float]:
    """(low, high) as factors of the step time of `timeline`, which is that of `program` by `costs`;
    in as many digits as a Run keeps."""
    low, high = parts(program, timeline, costs=costs).factors
    return round(low, 4), round(high, 4)


def parts(program: Program, timeline: Timeline, *, costs: Costs) -> Parts:
    """The shares of the first simulated rank's step, and how uncertain each is."""
    rank, times = min(timeline.ranks.items())
    ops, step = program.of_rank(rank).steady, max(1, timeline.step_time_ns)
    moving = [op for op in ops if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1]
    kernels = [op for op in ops if op.kind in COMPUTE_KINDS and op.stream == "compute"]
    busy, both, communication = (
        _busy_ns(times, found) for found in (kernels, [*kernels, *moving], moving)
    )
    hidden = busy + communication - both
    begin = min((times.starts[op.index] for op in moving), default=0)
    end = max((times.ends[op.index] for op in moving), default=0)
    around = _busy_ns(
        times,
        [op for op in kernels if times.ends[op.index] > begin and times.starts[op.index] < end],
    )
    by_constant, figures = (
        _times_by_constant(ops, costs),
        {figure.key: figure for figure in costs.cluster.device.figures},
    )
    more = SOFTWARE if costs.execution.compile or costs.execution.float8 else 0.0
    return Parts(
        compute=Part(
            share=busy / step, width=_compute_width(by_constant, figures, costs.cluster) + more
        ),
        network=Part(
            share=(both - busy) / step, width=_network_width(moving, program, rank, costs)
        ),
        host=Part(share=max(0, step - both) / step, width=HOST), hidden=hidden / step,
        spare=max(0, around - hidden) / step,
        issuing=0.0 if costs.execution.synchronous else sum(map(costs.issue_ns, ops)) / step,
        least=max(
            (figures[key].width or 0.0 for key in by_constant if key in figures), default=0.0
        ),
    )


def calibration(cluster: ClusterSpec, execution: Execution = EAGER) -> str:
    """"calibrated" where all constants that most of a step follows from were measured or fitted on
    such a machine, else "assumed"."""
    known = all(
        figure.provenance in ("measured", "calibrated")
        for figure in deciding(cluster.device.figures, execution)
    )
    return "calibrated" if known else "assumed"


MISALIGNED = "products of odd sizes"
"""No constant of a device: what they lose is assumed."""
FLOAT8 = "device.float8_efficiency"
DECIDING = ("device.matmul_efficiency", "device.elementwise_efficiency", "device.memory_efficiency")


def deciding(figures: tuple[Figure, ...], execution: Execution = EAGER) -> tuple[Figure, ...]:
    """The constants that most of a step's time follows from."""
    keys = (*DECIDING, FLOAT8) if execution.float8 else DECIDING
    return tuple(figure for figure in figures if figure.key in keys)


def _busy_ns(times: Times, ops: list[Op]) -> int:
    """Nanoseconds in which any of `ops` runs."""
    found = end = 0
    for start, stop in sorted((times.starts[op.index], times.ends[op.index]) for op in ops):
        found += max(0, stop - max(start, end))
        end = max(end, stop)
    return found


def _times_by_constant(ops: tuple[Op, ...], costs: Costs) -> dict[str, int]:
    """Nanoseconds of kernels by the constant that decides each."""
    times: dict[str, int] = {}
    for kernels, count in _kernels(ops):
        for kernel in kernels:
            key = _decides(kernel, costs)
            times[key] = times.get(key, 0) + count * costs.kernel_ns(kernel)
    return times


def _compute_width(
    times: Mapping[str, int], figures: Mapping[str, Figure], cluster: ClusterSpec
) -> float:
    """The half-widths of the constants, weighted by the times of the kernels that each decides."""
    total = sum(times.values())
    if not total:
        return 0.0
    return sum(ns * _width(figures.get(key), cluster) for key, ns in times.items()) / total


def _width(figure: Figure | None, cluster: ClusterSpec) -> float:
    """What a calibration of this very machine found, else what constants of such a provenance have
    in general."""
    if figure is not None and figure.width is not None:
        return figure.width
    width = COMPUTE[figure.provenance if figure else "assumed"]
    return CPU if cluster.kind == "cpu" and width >= COMPUTE["source code"] else width


def _kernels(ops: tuple[Op, ...]) -> list[tuple[tuple[Kernel, ...], int]]:
    """Each tuple of kernels once, and how often it runs."""
    found: dict[int, tuple[tuple[Kernel, ...], int]] = {}
    for op in ops:
        if op.kernels:
            found[id(op.kernels)] = op.kernels, found.get(id(op.kernels), ((), 0))[1] + 1
    return list(found.values())


def _decides(kernel: Kernel, costs: Costs) -> str:
    """The constant that most of this kernel's time follows from."""
    if kernel.place != "device":
        return "links.host.bandwidth"
    if is_attention(kernel.operator) and kernel.shape and costs.cluster.device.attention:
        return f"device.attention.{costs.execution.attention_kernels}.rate"
    if kernel.shape and compute.is_misaligned(
        kernel.shape, kernel.dtype, transposed=kernel.transposed
    ):
        return MISALIGNED
    if kernel.shape:
        return FLOAT8 if costs.execution.float8 else "device.matmul_efficiency"
    return (
        "device.memory_efficiency"
        if kernel.operator in STREAMS
        else "device.elementwise_efficiency"
    )


def _network_width(moving: list[Op], program: Program, rank: int, costs: Costs) -> float:
    """The half-widths of collectives, weighted by their times alone on their links."""
    total = wide = 0.0
    for (kind, nbytes, group), count in Counter(
        (op.kind, op.nbytes, op.group) for op in moving
    ).items():
        ranks = program.mesh.group(group, rank)
        weight = count * costs.collective_ns(kind, nbytes, ranks)
        total += weight
        wide += weight * collective_width(kind, nbytes, costs.cluster, ranks)
    return wide / total if total else 0.0


def collective_width(kind: str, nbytes: int, cluster: ClusterSpec, ranks: tuple[int, ...]) -> float:
    """The half-width of one collective's time, as a share of it."""
    inside = cluster.path(ranks).num_nodes <= 1
    key = "links.fabric.bandwidth" if inside else "links.rail.bandwidth"
    provenance = next(
        (figure.provenance for figure in cluster.figures if figure.key == key), "assumed"
    )
    if cluster.collectives == "nccl" and cluster.nccl is not None:
        found = estimated(kind, nbytes, cluster=cluster, ranks=ranks)
        return hypot(
            (found.high - found.low) / 2 / found.microseconds,
            ASSUMED_LINK if provenance == "assumed" else 0.0,
        )
    return LINKS.get(provenance, CPU)
