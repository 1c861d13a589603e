"""The constants of a GPU, fitted to single kernels: measured times over those of `kernel_ns`.

Kernels of one class are decided by one constant, and the median of their ratios scales it. How well
it carries to other sizes is judged on each kernel, predicted by the others of its class. No rate is
above the vendor's peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from zsim.calibration.accuracy import percentile
from zsim.calibration.fitting import fit_collectives
from zsim.calibration.fitting.fit_collectives import FittedCurves
from zsim.calibration.machine.device_request import TINY_NBYTES
from zsim.calibration.machine.fit import MachineError
from zsim.calibration.records import Collective
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.devices import Device
from zsim.engine.costs.kernel_time import STREAMS, kernel_ns
from zsim.engine.execution import Execution
from zsim.ir.ops import Kernel, is_attention
from zsim.runs.backend import DeviceMeasurements, DeviceRequest
from zsim.scenario.parts.cluster_schema import LEAST_WIDTH, MOST_WIDTH

ALONE = Execution(products="alone")
ATTENTION = "flash2"
"""The kernels of attention that are measured: those of torch's scaled_dot_product_attention."""
ROUNDS = 8
"""Fits one after another, since a kernel's start is a part of every kernel's time."""
DOUBTFUL = 0.15
"""Spread of equal calls from which a constant is doubted: the interquartile range over the median.
Assumed: a GPU that nobody else uses repeats a kernel within a few percent."""
AT_PEAK = 0.98
"""Measured over predicted time, below which a fitted rate is held down by the peak."""
SMALL = 2**16
"""Bytes of collectives that the device ends before the host has issued the next."""
HOST_LINK = "links.host.bandwidth"
RATES = (
    "device.matmul_efficiency", "device.float32_efficiency", "device.memory_efficiency",
    "device.elementwise_efficiency", f"device.attention.{ATTENTION}.rate",
    f"device.attention.{ATTENTION}.backward",
)
PACED = ("issue_operator", "issue_hook")
"""Overheads that go by the pace of the host, as `issue_kernel` has it."""
START = "device.kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """A constant by its key in a cluster's file: its number over that of the preset.

    The `errors` are of its kernels, each predicted by the others.
    """

    key: str
    factor: float
    errors: tuple[float, ...]
    spread: float
    at_peak: bool = False
    """Kernels were faster than the vendor's peak, so it stays there."""

    @property
    def width(self) -> float:
        """Half-width of the band: nine of ten left-out errors, and the spread of equal calls."""
        far = percentile([abs(error) for error in self.errors], 90)
        return min(MOST_WIDTH, max(LEAST_WIDTH, far, self.spread))

    @property
    def doubt(self) -> str:
        """The reason to doubt it, or ""."""
        if self.at_peak:
            return f"{self.key}: faster than the vendor's peak, where it stays: another GPU?"
        if self.spread > DOUBTFUL:
            return f"{self.key}: equal calls differ by {self.spread:.0%}: other work beside them?"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedDevice:
    """A node of GPUs with fitted constants: `cluster` has its device's; `curves` are None where
    there are no collectives to fit, for the reason `without_curves`."""

    cluster: ClusterSpec
    constants: tuple[FittedConstant, ...]
    curves: FittedCurves | None
    without_curves: str = ""

    @property
    def doubts(self) -> tuple[str, ...]:
        """The reasons to doubt constants."""
        return tuple(constant.doubt for constant in self.constants if constant.doubt)


def fit(
    request: DeviceRequest, measured: DeviceMeasurements, base: ClusterSpec, *, source: str
) -> FittedDevice:
    """The constants of the GPUs that were measured, which begin at those of `base`; MachineError
    where measurements are missing."""
    if not all(timed.device for timed in (*measured.kernels, *measured.collectives)) or len(
        measured.kernels
    ) != len(request.kernels):
        raise MachineError(
            where="this machine", expected="a time of every kernel", found="some are missing"
        )
    times = [median(timed.device) for timed in measured.kernels]
    classes = _classes(request.kernels)
    device = base.device
    for _ in range(ROUNDS):
        predicted = [_predicted(kernel, device) for kernel in request.kernels]
        ratios = {
            key: [times[index] / predicted[index] for index in members]
            for key, members in classes.items()
        }
        if START in classes:
            late = median(times[index] - predicted[index] for index in classes[START])
            device = replace(device, kernel=max(0, round(device.kernel + late)))
        device = scaled(device, {key: 1 / median(ratios[key]) for key in classes if key in RATES},
                        peaks=base.device)
    spreads = [_spread(timed.device) for timed in measured.kernels]
    constants = [
        FittedConstant(
            key=key, factor=number(device, key) / number(base.device, key),
            errors=_left_out(ratios[key]), spread=median(spreads[index] for index in members),
            at_peak=key in RATES and median(ratios[key]) < AT_PEAK,
        )
        for key, members in classes.items() if key != HOST_LINK
    ]
    constants += _of_the_host(request, measured, classes, base)
    curves, reason = _curves(request, measured, base, source=source)
    return FittedDevice(
        cluster=replace(base, device=device), constants=tuple(constants), curves=curves,
        without_curves=reason,
    )


def _classes(kernels: Sequence[Kernel]) -> dict[str, list[int]]:
    """The kernels by the constant that decides them."""
    classes: dict[str, list[int]] = {}
    for index, kernel in enumerate(kernels):
        classes.setdefault(_decided_by(kernel), []).append(index)
    return classes


def _decided_by(kernel: Kernel) -> str:
    if kernel.location == "link":
        return HOST_LINK
    if is_attention(kernel.operator):
        part = "backward" if kernel.operator.endswith("backward") else "rate"
        return f"device.attention.{ATTENTION}.{part}"
    if kernel.shape:
        is_narrow = kernel.dtype != "float32"
        return "device.matmul_efficiency" if is_narrow else "device.float32_efficiency"
    if kernel.nbytes <= TINY_NBYTES:
        return START
    is_stream = kernel.operator in STREAMS
    return "device.memory_efficiency" if is_stream else "device.elementwise_efficiency"


def _predicted(kernel: Kernel, device: Device) -> int:
    return kernel_ns(kernel, device, ALONE) if kernel.location == "device" else 1


def number(device: Device, key: str) -> float:
    """The constant of `device` that a cluster's file has at `key`."""
    of: object = device
    for part in key.split(".")[1:]:
        of = of[part] if isinstance(of, Mapping) else getattr(of, part)
    assert isinstance(of, int | float)
    return float(of)


def scaled(device: Device, factors: Mapping[str, float], *, peaks: Device) -> Device:
    """`device` with its rates multiplied, each at most at the peak that `peaks` has of it."""
    whole = {
        "device.matmul_efficiency": peaks.products_alone,
        "device.float32_efficiency": peaks.products_alone,
        f"device.attention.{ATTENTION}.rate": peaks.bfloat16 * peaks.products_alone,
    }
    new = {
        key: min(whole.get(key, 1.0), number(device, key) * factor)
        for key, factor in factors.items()
    }
    attention, own = dict(device.attention), dict[str, Any]()
    for key, value in new.items():
        *path, name = key.split(".")[1:]
        amount: Any = round(value) if value > 1 else value
        if path:
            attention[path[1]] = replace(attention[path[1]], **{name: amount})
        else:
            own[name] = amount
    return replace(device, attention=attention, **own)


def _left_out(ratios: Sequence[float]) -> tuple[float, ...]:
    """The relative error of each kernel's prediction by the median of the others."""
    return tuple(
        median([*ratios[:index], *ratios[index + 1 :]] or ratios) / ratio - 1
        for index, ratio in enumerate(ratios)
    )


def _spread(times: Sequence[int]) -> float:
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else (0, 0, 0)
    return (high - low) / median(times)


def _of_the_host(
    request: DeviceRequest, measured: DeviceMeasurements, classes: Mapping[str, Sequence[int]],
    base: ClusterSpec,
) -> list[FittedConstant]:
    """The link to the host's memory, and the host's times to issue a kernel and a collective.

    Operators and hooks, which only whole steps show, go by the pace of its kernels.
    """
    constants = list[FittedConstant]()
    if HOST_LINK in classes:
        rates = [
            1e9 * request.kernels[index].nbytes / median(measured.kernels[index].device)
            for index in classes[HOST_LINK]
        ]
        constants.append(_of_values(HOST_LINK, rates, base.links.host.bandwidth))
    issued = {
        "issue_kernel": [
            median(measured.kernels[index].issue) for index in classes.get(START, ())
        ],
        "issue_collective": [
            median(timed.issue)
            for (_, nbytes), timed in zip(request.collectives, measured.collectives, strict=True)
            if nbytes <= SMALL
        ],
    }
    constants += [
        _of_values(f"overheads.{name}", times, getattr(base.overheads, name))
        for name, times in issued.items() if times
    ]
    return constants + [
        replace(constant, key=f"overheads.{name}")
        for constant in constants if constant.key == "overheads.issue_kernel"
        for name in PACED if getattr(base.overheads, name)
    ]


def _of_values(key: str, values: Sequence[float], before: float) -> FittedConstant:
    return FittedConstant(
        key=key, factor=max(1.0, median(values)) / max(1.0, before), errors=_left_out(values),
        spread=0.0,
    )


def _curves(
    request: DeviceRequest, measured: DeviceMeasurements, base: ClusterSpec, *, source: str
) -> tuple[FittedCurves | None, str]:
    """The curves of collectives, as logs of nccl-tests are fitted; or the reason for none."""
    if not request.collectives or base.nccl is None:
        return None, "one GPU alone: collectives stay as the preset has them"
    rows = [
        Collective(
            source=source, line=0, op=kind, nbytes=nbytes, seconds=median(timed.device) / 1e9,
            cluster=base, through_torch=True,
        )
        for (kind, nbytes), timed in zip(request.collectives, measured.collectives, strict=True)
    ]
    kept, skipped = fit_collectives.usable(rows, base.nccl)
    if not kept:
        return None, f"collectives stay as the preset has them: {skipped[0].reason}"
    return fit_collectives.fit(kept, base.nccl, source=source), ""
