"""Error bands of predicted times, from the provenance of the constants behind them.

A band is a pair of factors around the prediction in which we expect nine of ten measurements. A
step consists of compute, exposed communication, and time in which the device waits for the host.
Each is as uncertain as the constants behind it, and counts with its share of the step.

Calibrated constants earn a narrow band by their held-out error, those of a cluster file by the
errors of its own fit. Assumed constants widen it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import hypot, log2

from zsim.cluster.cluster import ClusterSpec, Path
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.devices import PresetFigure
from zsim.cluster.measured_times import times_of
from zsim.engine.bands.step_shares import StepShare, StepShares
from zsim.engine.contention.overlap import COMPUTE as COMPUTE_KINDS
from zsim.engine.costs import host_work
from zsim.engine.costs import kernel_time as compute
from zsim.engine.costs.kernel_time import STREAMS
from zsim.engine.costs.op_costs import Costs
from zsim.engine.equal_micro_batches import Repeated
from zsim.engine.execution import EAGER, Execution
from zsim.engine.timeline import Timeline, Times
from zsim.ir.ops import COLLECTIVES, Kernel, Op, is_attention
from zsim.ir.program import Program

COMPUTE: Mapping[str, float] = {
    "measured": 0.05,
    "calibrated": 0.06,
    "published": 0.1,
    "source code": 0.2,
    "vendor sheet": 0.3,
    "assumed": 0.3,
}
"""Half-width of a kernel's time as a share of it, by the provenance of the constant behind it.

Calibrated: nine of ten steps of llm-foundry whose model size was left out are within 4.6 %, and
products are seven tenths of them. Published: nine of ten whose generation was left out are within
8 %. Assumed: a fraction carried to the next generation of GPUs was 18 % off, doubled for the 95th
percentile. The record of both is tests/published/left_out.json."""
CPU = 0.4
"""Half-width of compute and links of CPUs, where they are assumed. Published steps run up to 65 %
longer than a roofline of such figures."""
HOST_STEP = 4.0
"""Share by which the optimizer's step on the host of a GPU server may take longer. Published steps
of 7B and 72B take five times what memory's bandwidth allows (ZenFlow's blog, DeepSpeed issue 6834).
Those of ZeRO-Offload on a DGX-2 take 1.2 and 1.4 times that."""
QUEUED_DRIVES = 0.43
"""Half-width of reads and writes of drives where a scenario says its requests at once. That much is
the largest error against ten published rates (`DRIVE_LATENCY_NS`)."""
LINKS: Mapping[str, float] = {"measured": 0.3, "calibrated": 0.1}
"""Half-width of collectives of libraries other than NCCL, by the provenance of the link's
bandwidth. Gloo's shortest time moves with the host's load."""
ASSUMED_LINK = 0.3
"""Half-width of NCCL's collectives over a link of assumed bandwidth, beside that of their curves
from other machines."""
HOST = 0.3
"""Half-width of the host's time and of a trainer's pauses, which reach from 0.7 to 1 / 0.7 of it.
Hosts differ by that factor of two. An operator takes those of an H100 and an H200 here 42 us, that
of gpt-fast's A100 83, and vTrain's 62."""
PAUSE_NS = 7_400_000
"""Nanoseconds by which a host that pauses may make a step longer. Of 89 steps of single GPUs, nine
of ten took at most so much more than the fastest of their run (tests/measured, two hosts)."""
PAUSED_NS = 58_000_000
"""The shortest of these steps. In a shorter one a host pauses in proportion to it."""
FULL = 0.25
"""Share by which a step that gives cached memory back may take longer. Such steps take 10 to 25 %
longer in all: 4 to 12 % on one H100 (tests/measured), 19 % in thunder's issue 420. The calls of
the driver that are predicted are a part of that."""
NO_ROOM = COMPUTE["assumed"]
"""Half-width of a step that has no room on its device. It cannot run as its scenario says, so its
band is as if all constants were assumed."""
KNOWN_NODES, GROWTH = 8, 0.016
"""Most nodes of steps that constants were fitted to, and the share by which a step may take longer
for each doubling beyond. Public steps on more than 16 nodes grow by that much more than predicted.
"""
SOFTWARE = 0.05
"""Half-width of a GPU's kernels by software of another generation than the constants are of, which
moves steps by 5 to 15 %. Compiled steps and products in 8 bits, with one row each to calibrate on,
add as much once more."""
POWER = 0.45
"""Share by which the loss of clocks under a cap on power may be other than by the law. A100 of
300 W lose a third less (products alone), H100 of 500 W four tenths more (torchtitan's steps).
"""
def band(
    program: Program, timeline: Timeline, *, costs: Costs, repeated: Repeated | None = None
) -> tuple[float, float]:
    """(low, high) as factors of the step time of `timeline`, in the four digits that a Run keeps.

    `timeline` is that of `program` by `costs`; with `repeated`, of a step of more micro-batches.
    """
    low, high = step_shares(program, timeline, costs=costs, repeated=repeated).factors
    return round(low, 4), round(high, 4)


def step_shares(
    program: Program, timeline: Timeline, *, costs: Costs, repeated: Repeated | None = None
) -> StepShares:
    """The shares of the first simulated rank's step, with half-widths; arguments as `band`'s."""
    rank = min(timeline.ranks)
    times, kind = timeline.ranks[rank], program.assignment[rank]
    ops, step = program.ranks[kind].steady, max(1, timeline.step_time_ns)
    took = _sums(ops, times, program, rank, costs)
    if repeated is not None:
        step = repeated.step_time_ns
        fewer = _sums(*repeated.without_fourth(ops, kind, times), program, rank, costs)
        took = {key: ns + repeated.times * (ns - fewer.get(key, 0)) for key, ns in took.items()}
    by_constant = {key.removeprefix(BY): ns for key, ns in took.items() if key.startswith(BY)}
    figures = {figure.key: figure for figure in costs.cluster.device.figures}
    hidden = took["busy"] + took["communication"] - took["both"]
    here = any(figures[key].width for key in by_constant if key in figures)
    software = 0.0 if here or costs.cluster.kind == "cpu" else SOFTWARE
    fused = SOFTWARE if costs.execution.compile or costs.execution.float8 else 0.0
    power = POWER * (1 - costs.cluster.device.clocks)
    constants = _compute_width(by_constant, figures, costs.cluster)
    shorter, longer = _other_steps(ops, costs)
    return StepShares(
        compute=StepShare(
            share=took["busy"] / step, width=hypot(constants, software, fused, power)
        ),
        network=StepShare(
            share=(took["both"] - took["busy"]) / step,
            width=took["collectives, wide"] / took["collectives"] if took["collectives"] else 0.0,
        ),
        host=StepShare(
            share=max(0, step - took["both"]) / step, width=_host_width(costs.cluster)
        ),
        hidden=hidden / step, spare=max(0, took["around"] - hidden) / step,
        growth=GROWTH * max(0.0, log2(costs.cluster.num_nodes / KNOWN_NODES)),
        paused=0.0 if costs.cluster.kind == "cpu" else PAUSE_NS / max(step, PAUSED_NS),
        issuing=0.0 if costs.execution.synchronous else took["issuing"] / step,
        stepped=took["stepped"] / step * longer, hurried=took["stepped"] / step * shorter,
        full=FULL if program.room == "tight" else 0.0,
        unroomed=NO_ROOM if program.room == "none" else 0.0,
        least=max(
            (figures[key].width or 0.0 for key in by_constant if key in figures), default=0.0
        ),
    )


def _other_steps(ops: Sequence[Op], costs: Costs) -> tuple[float, float]:
    """Shares by which the optimizer's step on the host may be shorter, with all cores, and longer,
    as published ones are, or with one thread. 0 on a CPU."""
    if costs.cluster.kind == "cpu":
        return 0.0, 0.0
    kernels = [each for op in _stepped(ops) for each in op.kernels if each.location == "host"]
    fastest, slowest = host_work.by_threads(kernels, costs.cluster, costs.execution)
    shorter = 1 - fastest * (1 - HOST) if fastest < 1 else 0.0
    return shorter, max(HOST_STEP, slowest / (1 - HOST) - 1)


def _stepped(ops: Sequence[Op]) -> list[Op]:
    """The optimizer's steps on the host."""
    return [
        op for op in ops
        if op.kind == "optimizer" and any(kernel.location == "host" for kernel in op.kernels)
    ]


BY = "by "
"""Begin of the names of sums over kernels, by the constant that decides them."""


def _sums(
    ops: Sequence[Op], times: Times, program: Program, rank: int, costs: Costs
) -> dict[str, float]:
    """Nanoseconds of a step by name. Each is a sum over its ops, or the time in which some run."""
    moving = [op for op in ops if op.kind in COLLECTIVES and program.mesh.size(op.group) > 1]
    kernels = [op for op in ops if op.kind in COMPUTE_KINDS and op.stream == "compute"]
    begin = min((times.starts[op.index] for op in moving), default=0)
    end = max((times.ends[op.index] for op in moving), default=0)
    around = [op for op in kernels if times.ends[op.index] > begin and times.starts[op.index] < end]
    alone, wide = _collectives(moving, program, rank, costs)
    return {
        "busy": _busy_ns(times, kernels), "both": _busy_ns(times, [*kernels, *moving]),
        "communication": _busy_ns(times, moving), "around": _busy_ns(times, around),
        "stepped": _busy_ns(times, _stepped(ops)),
        "issuing": sum(map(costs.issue_ns, ops)), "collectives": alone, "collectives, wide": wide,
        **{f"{BY}{key}": ns for key, ns in _times_by_constant(ops, costs).items()},
    }


def calibration(
    cluster: ClusterSpec, execution: Execution = EAGER, *, uses_drives: bool = False
) -> str:
    """Provenance of the constants that decide most of a step, those of its drives too if it
    `uses_drives`.

    It is "calibrated" where all were measured or fitted on such a machine, "published" where each
    has another source, else "assumed".
    """
    provenances = {figure.provenance for figure in deciding(cluster.device.figures, execution)}
    if uses_drives:
        provenances |= {
            figure.provenance for figure in cluster.figures if figure.key in DRIVES
        }
    if "assumed" in provenances:
        return "assumed"
    return "calibrated" if provenances <= {"measured", "calibrated"} else "published"


MISALIGNED = "products of odd sizes"
"""Key of misaligned products, whose loss is no constant of a device but assumed."""
SINGLY = "elements one by one"
"""Key of kernels that take them so. Their rate is no constant of a device: of Hopper's six kernels
were measured, elsewhere it is assumed."""
FLOAT8 = "device.float8_efficiency"
DRIVES = ("drives.read", "drives.write")
DECIDING = ("device.matmul_efficiency", "device.elementwise_efficiency", "device.memory_efficiency")


def deciding(
    figures: tuple[PresetFigure, ...], execution: Execution = EAGER
) -> tuple[PresetFigure, ...]:
    """The constants among `figures` that decide most of a step's time."""
    keys = (*DECIDING, FLOAT8) if execution.float8 else DECIDING
    return tuple(figure for figure in figures if figure.key in keys)


def _host_width(cluster: ClusterSpec) -> float:
    """The half-width of the host's time: none of its own where it was calibrated with the steps
    whose errors are the width of the whole."""
    return 0.0 if any(
        figure.key == "overheads.issue_kernel" and figure.provenance == "calibrated"
        for figure in cluster.figures
    ) else HOST


def _busy_ns(times: Times, ops: list[Op]) -> int:
    """Nanoseconds in which any of `ops` runs."""
    busy = end = 0
    for start, stop in sorted([(times.starts[op.index], times.ends[op.index]) for op in ops]):
        if stop > end:
            busy += stop - (start if start > end else end)
            end = stop
    return busy


def _times_by_constant(ops: Sequence[Op], costs: Costs) -> dict[str, int]:
    """Nanoseconds of kernels by the constant that decides each."""
    runs: dict[Kernel, int] = {}
    for kernels, count in _kernels(ops):
        for kernel in kernels:
            runs[kernel] = runs.get(kernel, 0) + count
    times: dict[str, int] = {}
    for kernel, count in runs.items():
        key = _decides(kernel, costs)
        times[key] = times.get(key, 0) + count * costs.kernel_ns(kernel)
    return times


def _compute_width(
    times: Mapping[str, float], figures: Mapping[str, PresetFigure], cluster: ClusterSpec
) -> float:
    """The half-widths of the constants, each with its share of the kernels' time. Each has its own
    evidence, so errors are independent and their squares add up."""
    total = sum(times.values())
    if not total:
        return 0.0
    widths = {
        key: QUEUED_DRIVES if key == "queued drives"
        else COMPUTE["source code"] if key == SINGLY and _is_hopper(cluster)
        else _width(figures.get(key), cluster)
        for key in times
    }
    return hypot(*(ns * widths[key] for key, ns in times.items())) / total


def _is_hopper(cluster: ClusterSpec) -> bool:
    runtime = cluster.device.runtime
    return runtime is not None and runtime.capability == compute.HOPPER


def _width(figure: PresetFigure | None, cluster: ClusterSpec) -> float:
    """The half-width of a constant: from a calibration on this machine, else by its provenance."""
    if figure is not None and figure.width is not None:
        return figure.width
    width = COMPUTE[figure.provenance if figure else "assumed"]
    return CPU if cluster.kind == "cpu" and width >= COMPUTE["source code"] else width


def _kernels(ops: Sequence[Op]) -> list[tuple[tuple[Kernel, ...], int]]:
    """Each tuple of kernels once, with the number of its runs."""
    counts: dict[int, tuple[tuple[Kernel, ...], int]] = {}
    for op in ops:
        if op.kernels:
            counts[id(op.kernels)] = op.kernels, counts.get(id(op.kernels), ((), 0))[1] + 1
    return list(counts.values())


def _decides(kernel: Kernel, costs: Costs) -> str:
    """The key of the constant that decides most of this kernel's time."""
    if kernel.location == "drive" and costs.execution.drive_queue_nbytes:
        return "queued drives"
    if kernel.location != "device":
        return "links.host.bandwidth"
    if is_attention(kernel.operator) and kernel.shape and costs.cluster.device.attention:
        return f"device.attention.{costs.execution.attention_kernels}.rate"
    if kernel.shape:
        dtype = compute.multiplied_in(kernel, costs.execution)
        if compute.is_misaligned(kernel.shape, dtype, transposed=kernel.transposed) and not (
            compute.is_padded(kernel, dtype, costs.execution)
        ):
            return MISALIGNED
        return f"device.{costs.cluster.device.efficiency_of(dtype)}"
    if compute.is_singly(kernel, costs.cluster.device, costs.execution):
        return SINGLY
    return (
        "device.memory_efficiency"
        if kernel.operator in STREAMS
        else "device.elementwise_efficiency"
    )


def _collectives(
    moving: list[Op], program: Program, rank: int, costs: Costs
) -> tuple[float, float]:
    """Nanoseconds of collectives alone on their links, and those times their half-widths."""
    total = wide = 0.0
    for (kind, nbytes, group), count in Counter(
        (op.kind, op.nbytes, op.group) for op in moving
    ).items():
        ranks = program.mesh.group(group, rank)
        weight = count * costs.collective_ns(kind, nbytes, ranks)
        total += weight
        wide += weight * collective_width(kind, nbytes, costs.cluster, costs.path(ranks))
    return total, wide


def collective_width(kind: str, nbytes: int, cluster: ClusterSpec, path: Path) -> float:
    """The half-width of one collective's time along `path`, as a share of it."""
    inside = path.num_nodes <= 1
    key = "links.fabric.bandwidth" if inside else "links.rail.bandwidth"
    provenance = next(
        (figure.provenance for figure in cluster.figures if figure.key == key), "assumed"
    )
    width = LIBRARIES[cluster.collectives].half_width(kind, nbytes, cluster=cluster, path=path)
    if width is not None:
        return hypot(width, ASSUMED_LINK if provenance == "assumed" else 0.0)
    measured = times_of(cluster.times, kind, path.num_ranks) if inside else None
    return measured.width if measured else LINKS.get(provenance, CPU)
