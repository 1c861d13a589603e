"""The constants of a machine, fitted to measured steps and collectives.

On a CPU a step without communication is a sum: the host issues one op after another and each ends
before the next begins. So its time is linear in the constants, and non-negative least squares on
relative errors finds them. How well they carry is judged on each model left out of its own fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from zsim.calibration.machine.attention_fit import KINDS, attention_rate
from zsim.calibration.machine.request import BESIDE_NBYTES
from zsim.cluster.devices import Device
from zsim.cluster.measured_times import MeasuredTimes
from zsim.engine.contention.overlap import LARGEST_LOSS
from zsim.engine.costs import kernel_time
from zsim.engine.costs.issue_times import SOON_NS, TICK_NS
from zsim.engine.costs.kernel_time import STREAMS
from zsim.errors import ZsimError
from zsim.ir.ops import COLLECTIVES, Kernel
from zsim.ir.program import Program
from zsim.runs.backend import MachineMeasurements, MachineRequest
from zsim.scenario.parts.cluster_schema import LEAST_WIDTH, MOST_WIDTH
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

KERNELS = ("products", "streams", "elementwise")
"""The parts of a step's time that the device takes, by the constant that decides them."""
CALLS = {
    "kernels": "issue_kernel", "collectives": "issue_collective", "hooks": "issue_hook",
    "dtensors": "step_dtensor",
}
"""The parts that the host takes: what it calls, and the overhead of each call."""
TERMS = (*KERNELS, *CALLS)
MEASURED = TERMS.index("products")
"""The term that is measured alone, and has the coefficient 1."""
FITS = 3
"""Fits one after another: which products are bound by their bytes follows from the last one."""
DTYPES = ("float32", "bfloat16", "float16")
"""Rates of products; only float32 is measured, the others keep their proportion to it."""
ROUNDS = 20_000
MOST_LOAD = 0.25
"""Share of the cores that other work may have while constants are measured."""
BUSY_SPREAD = 0.5
"""Spread of equal steps from which a machine counts as busy: the interquartile range over the
median. A quiet one has 2 to 10 %."""


class MachineError(ZsimError):
    """Measurements of which no machine's constants can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedMachine:
    """The constants of a machine: the `device` with fitted rates, and `calls`, the host's
    nanoseconds by term."""

    device: Device
    calls: Mapping[str, float]
    wake: int
    """Nanoseconds of the longest wait of a collective for a core."""
    times: tuple[MeasuredTimes, ...]
    errors: tuple[float, ...]
    """Relative errors of steps, each predicted by the fit to the others."""
    spread: float
    """The median spread of equal steps: interquartile range over median."""
    others_share: float = 0.0
    """Share of the cores that other work took while this was measured."""

    @property
    def width(self) -> float:
        """Half-width of a step's band: the largest of nine in ten held-out errors, the spread of
        equal steps, and the share of other work.

        Where others took a share s, a step took up to 1 / (1 - s) of its time; without them it
        takes s less.
        """
        held_out = _quantile(list(map(abs, self.errors)), 0.9)
        return min(MOST_WIDTH, max(LEAST_WIDTH, held_out, self.spread, self.others_share))

    @property
    def busy(self) -> str:
        """Words on other work beside the measurement; "" on a quiet machine."""
        reasons = []
        if self.others_share > MOST_LOAD:
            reasons.append(f"other work took {self.others_share:.0%} of this machine's cores")
        if self.spread > BUSY_SPREAD:
            reasons.append(f"equal steps differ by {self.spread:.0%}")
        return " and ".join(reasons)


def fit(request: MachineRequest, measured: MachineMeasurements) -> FittedMachine:
    """The machine of the measurements; MachineError where there are too few."""
    targets = [median(times) for times in measured.steps]
    alone = (*measured.products, *measured.attentions)
    missing = len(request.products) + 2 * len(request.attentions) - len(alone)
    if not targets or missing or not all((*measured.steps, *measured.collectives, *alone)):
        raise MachineError(
            where="this machine", expected="a time of every measurement", found="some are missing"
        )
    device, programs = request.scenarios[0].cluster.device, _programs(request)
    device = scaled(device, {"products": _products(request, measured, device)})
    attention = attention_rate(request.attentions, measured.attentions, most=device.float32)
    device = replace(device, attention=dict.fromkeys(KINDS, attention))
    for _ in range(FITS):
        rows = [_terms(scenario, program, device) for scenario, program in programs]
        coefficients = dict(zip(TERMS, _least_squares(rows, targets), strict=True))
        device = scaled(device, coefficients)
    return FittedMachine(
        device=replace(device, interference=_interference(request, measured)),
        calls={name: coefficients[name] for name in CALLS},
        wake=_wake(request, measured),
        times=_times(request, measured),
        errors=tuple(_left_out(rows, targets)),
        spread=median(map(_spread, measured.steps)), others_share=measured.others_share,
    )


def _programs(request: MachineRequest) -> list[tuple[Scenario, Program]]:
    return [(scenario, plan(scenario, device="cpu")) for scenario in request.scenarios]


def _left_out(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> Iterator[float]:
    """The relative error of each step, predicted by the fit to the others."""
    for index, (row, target) in enumerate(zip(rows, targets, strict=True)):
        others = [i for i in range(len(rows)) if i != index]
        coefficients = _least_squares([rows[i] for i in others], [targets[i] for i in others])
        yield total(coefficients, row) / target - 1


def scaled(device: Device, coefficients: Mapping[str, float]) -> Device:
    """`device` with rates at which its kernels take `coefficients` times as long."""
    factor = {name: coefficients.get(name) or 1.0 for name in KERNELS}
    streams = device.memory_bandwidth * device.memory_efficiency / factor["streams"]
    others = device.memory_bandwidth * device.elementwise_efficiency / factor["elementwise"]
    # Shares are at most one: the bandwidth is what the faster of the two kinds reaches.
    fastest = max(streams, others)
    rates = {name: round(getattr(device, name) / factor["products"]) for name in DTYPES}
    return replace(
        device, memory_bandwidth=round(fastest), memory_efficiency=streams / fastest,
        elementwise_efficiency=others / fastest, **rates,
    )


def _terms(scenario: Scenario, program: Program, device: Device) -> list[float]:
    """The parts of the scenario's step: nanoseconds of kernels on `device`, and counts of calls."""
    execution, terms = scenario.executed, dict.fromkeys(TERMS, 0.0)
    for op in program.of_rank(0).steady:
        if op.kind in COLLECTIVES:
            terms["collectives"] += 1
            terms["hooks"] += execution.hooks
        terms["kernels"] += len(op.kernels)
        terms["dtensors"] += len(op.kernels) * (op.kind == "optimizer" and execution.dtensors)
        for kernel in op.kernels:
            ns = kernel_time.kernel_ns(kernel, device, execution)
            terms[_kind(kernel, ns, device)] += ns
    return list(terms.values())


def _kind(kernel: Kernel, ns: int, device: Device) -> str:
    """The term of a kernel; a thin product is bound by its bytes, which stream."""
    if not kernel.shape:
        return "streams" if kernel.operator in STREAMS else "elementwise"
    streamed = kernel.nbytes * 10**9 / (device.memory_bandwidth * device.memory_efficiency)
    return "streams" if streamed > ns - 1 else "products"


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Non-negative coefficients that minimize the squared relative errors, by coordinate descent.
    """
    scales = [max(row[i] / t for row, t in zip(rows, targets, strict=True)) or 1.0
              for i in range(len(TERMS))]
    weighted = [
        [value / target / scale for value, scale in zip(row, scales, strict=True)]
        for row, target in zip(rows, targets, strict=True)
    ]
    span = range(len(TERMS))
    products = [[sum(row[i] * row[j] for row in weighted) for j in span] for i in span]
    sums = [sum(row[i] for row in weighted) for i in span]
    solution = [0.0] * len(TERMS)
    solution[MEASURED] = scales[MEASURED]
    for _ in range(ROUNDS):
        moved = 0.0
        for i in span:
            if i == MEASURED or not products[i][i]:
                continue
            rest = sums[i] - sum(products[i][j] * solution[j] for j in span)
            new = max(0.0, solution[i] + rest / products[i][i])
            moved = max(moved, abs(new - solution[i]))
            solution[i] = new
        if moved < 1e-12:
            break
    return [value / scale for value, scale in zip(solution, scales, strict=True)]


def total(coefficients: Sequence[float], row: Sequence[float]) -> float:
    """The time of a step with the terms `row`."""
    return sum(c * value for c, value in zip(coefficients, row, strict=True))


def _products(
    request: MachineRequest, measured: MachineMeasurements, device: Device
) -> float:
    """The time of products of matrices over that on `device`: the median of all shapes."""
    return median(
        _mean(times) / (1e9 * kernel_time.product_s((1, *shape), device, DTYPES[0]))
        for shape, times in zip(request.products, measured.products, strict=True)
    )


def _wake(request: MachineRequest, measured: MachineMeasurements) -> int:
    """The wait for a core after a tick of compute: the mean of collectives after one, less that of
    the same collectives soon after another."""
    alone = _alone(request, measured)
    waits = [
        _mean(lasted) - alone[timed.kind, timed.nbytes]
        for timed, lasted in zip(request.collectives, measured.collectives, strict=True)
        if timed.computed_ns == TICK_NS
    ]
    return max(0, round(sum(waits) / len(waits))) if waits else 0


def _interference(request: MachineRequest, measured: MachineMeasurements) -> float:
    """The share of a collective's time that compute beside it loses: the losses of all kinds over
    their times."""
    alone = _alone(request, measured)
    lost = {
        timed.kind: _mean(lasted)
        for timed, lasted in zip(request.collectives, measured.collectives, strict=True)
        if timed.beside
    }
    taken = sum(alone[kind, BESIDE_NBYTES] for kind in lost)
    return min(LARGEST_LOSS, sum(lost.values()) / taken) if taken else 0.0


def _alone(
    request: MachineRequest, measured: MachineMeasurements
) -> dict[tuple[str, int], float]:
    """The mean time of collectives over all ranks soon after another, by kind and bytes."""
    return {
        (timed.kind, timed.nbytes): _mean(lasted)
        for timed, lasted in zip(request.collectives, measured.collectives, strict=True)
        if timed.computed_ns == SOON_NS and timed.ranks == request.world_size and not timed.beside
    }


def _times(
    request: MachineRequest, measured: MachineMeasurements
) -> tuple[MeasuredTimes, ...]:
    """The collectives' times: means, made to grow with the size.

    A thread that gloo wakes may wait 4 ms for a tick of the scheduler. A median would have all of
    that or nothing; a step has the mean.
    """
    curves: dict[tuple[str, int], list[tuple[int, int, float]]] = {}
    for timed, times in zip(request.collectives, measured.collectives, strict=True):
        if timed.computed_ns == TICK_NS or timed.beside:
            continue
        curves.setdefault((timed.kind, timed.ranks), []).append(
            (timed.nbytes, round(_mean(times)), _doubt(times))
        )
    return tuple(
        MeasuredTimes(
            collective=kind, ranks=ranks, points=tuple(growing(points)),
            width=min(MOST_WIDTH, max(
                LEAST_WIDTH, median(point[2] for point in points), measured.others_share
            )),
            source="measured alone, all ranks of the machine at work",
        )
        for (kind, ranks), points in curves.items()
    )


def growing(points: list[tuple[int, int, float]]) -> list[tuple[int, int]]:
    """The points with times that never fall: those that do share the mean of their run."""
    runs: list[list[int]] = []
    for _, ns, _ in points:
        runs.append([ns])
        while len(runs) > 1 and _mean(runs[-2]) > _mean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    level = [round(_mean(run)) for run in runs for _ in run]
    return [(nbytes, max(1, ns)) for (nbytes, _, _), ns in zip(points, level, strict=True)]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _doubt(times: Sequence[int]) -> float:
    """Twice the standard error of the mean, over the mean. A step has many collectives, whose sum
    is as near to the sum of means as these are known."""
    return 2 * stdev(times) / math.sqrt(len(times)) / _mean(times) if len(times) > 1 else MOST_WIDTH


def _spread(times: Sequence[int]) -> float:
    """The interquartile range over the median."""
    return (_quantile(times, 0.75) - _quantile(times, 0.25)) / median(times)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def constants(fitted: FittedMachine) -> dict[str, dict[str, str]]:
    """The fitted constants as a cluster's file has them: of the device, of its attention and of the
    overheads."""
    device = fitted.device
    rates = device.attention[KINDS[0]]
    shares = (
        "memory_efficiency", "elementwise_efficiency", "matmul_efficiency", "interference"
    )
    return {
        "device": {
            "memory_bandwidth": f"{device.memory_bandwidth / 10**9:.4g} GB/s",
            **{name: f"{100 * getattr(device, name):.4g} %" for name in shares},
            **{name: f"{getattr(device, name) / 10**9:.4g} GFLOP/s" for name in DTYPES},
        },
        "attention": {
            "rate": f"{rates.rate / 10**9:.4g} GFLOP/s", "half_length": str(rates.half_length),
            "backward": f"{100 * rates.backward:.4g} %",
        },
        "overheads": {
            "collective": "0 ns",
            **{key: f"{round(fitted.calls[name])} ns" for name, key in CALLS.items()},
            "wake": f"{fitted.wake} ns",
        },
    }
