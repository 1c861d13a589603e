"""Devices from preset files: memory, peaks, and what kernels reach of them, each number with its
source.

A file holds one device. What is calibrated says on what; a fraction reached is never carried from
one generation to another without saying so. It knows no cluster and no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import Any, Literal

from zsim.io.units import (
    UnitError,
    parse_bytes,
    parse_flop_rate,
    parse_fraction,
    parse_power,
    parse_rate,
    parse_time,
)
from zsim.presets import preset_names, preset_table

Provenance = Literal[
    "vendor sheet", "published", "source code", "measured", "calibrated", "assumed"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetFigure:
    """One number of a preset as it was written, and where it comes from."""

    key: str
    text: str
    provenance: Provenance
    source: str
    width: float | None = None
    """The half-width of what is calibrated, by the errors of its own fit; None where it is what
    such constants have in general."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """FLOP/s of a fused attention kernel: it nears `rate` as sequences grow, and has half of that
    at `half_length`.

    Backward reaches the share `backward` of forward's rate. Heads of 64 columns have the share
    `narrow` of the rate of 128 both ways, as scores have an exponential each for fewer FLOPs.
    """

    rate: int
    half_length: int
    backward: float
    narrow: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A GPU's properties in CUDA and NCCL.

    The compute `capability` is 90 on Hopper. NCCL has `channels` inside a node, and `nvls_channels`
    for NVLS (0: none). CUDA reports `capacity` bytes, at least `least_capacity` and at most
    `most_capacity`. The CUDA context takes `context` bytes.
    """

    capability: int
    channels: int
    nvls_channels: int
    capacity: int
    least_capacity: int
    most_capacity: int
    context: int
    figures: tuple[PresetFigure, ...] = field(repr=False)

    def figure(self, key: str) -> PresetFigure:
        """The figure of `key`, with where it comes from; KeyError for another."""
        return {figure.key: figure for figure in self.figures}[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a rank: bytes of memory, bytes/s to it, dense peak FLOP/s by dtype, and the
    shares that kernels reach of both. A `float8` or `tf32` of 0 means no such products.

    Plain streams reach `memory_efficiency`, eager element-wise kernels `elementwise_efficiency`,
    and large products near the `efficiency` of their dtype. A tile of a product of two bytes costs
    `matmul_prologue` steps of k besides its own. The share `wave_cost` of the idle part of a last
    wave of tiles is lost.

    The start of a kernel takes `kernel` nanoseconds. A host with `launch_queue` kernels pending
    waits (0: it never does). Beside a collective, kernels lose the share `interference` of what it
    takes (`zsim.engine.costs.interference`). The collective itself loses the share
    `collective_interference` of the time in which kernels run beside it. With each doubling of
    nodes a step waits `straggler` longer for the slowest rank. An empty `attention` means that
    products do its work.
    """

    name: str
    node: str = ""
    """The cluster preset of the node that it is sold in, "" for none."""
    memory: int
    memory_bandwidth: int
    float32: int
    bfloat16: int
    float16: int
    float8: int
    num_sms: int
    matmul_efficiency: float
    float8_efficiency: float
    memory_efficiency: float
    elementwise_efficiency: float
    matmul_prologue: int
    wave_cost: float
    kernel: int
    launch_queue: int
    interference: float
    collective_interference: float
    straggler: float
    attention: Mapping[str, AttentionRate] = field(hash=False)
    figures: tuple[PresetFigure, ...] = field(repr=False)
    tf32: int = 0
    float32_efficiency: float | None = None
    tf32_efficiency: float | None = None
    """Shares of products in float32 and in TF32; None for `matmul_efficiency`."""
    tdp: int = 0
    """Watts that it may draw; 0 where the file does not say."""
    power: int = 0
    """Watts at which its draw is capped; 0 for no cap but `tdp`."""
    products_alone: float = 1.0
    """Time of a product alone, whose clocks are higher, over its time in training; 1.0 where the
    file has none."""
    tiled_for: int = 0
    """Multiprocessors for which libraries choose the tiles of products; 0 for those that there are.
    Libraries do not know of those that a collective holds."""
    runtime: Runtime | None = None
    """None for a CPU, and where the file has no such table."""

    def peak_flops(self, dtype: str) -> int:
        """Dense peak FLOP/s for matrix products of `dtype`, which may be "tf32" or "float8".

        Files say none of wider dtypes, nor of complex numbers and integers: theirs follow from
        float32's.
        """
        rates = {
            "tf32": self.tf32, "bfloat16": self.bfloat16, "float16": self.float16,
            "float8": self.float8,
        }
        return rates[dtype] if dtype in rates else self.float32 // OF_FLOAT32.get(dtype, 1)

    @property
    def clocks(self) -> float:
        """Share of the clocks of its arithmetic that a cap on power leaves under a full load.

        What it draws beyond idling goes by f·V², and V by f, so clocks go by the cube root of it.
        """
        if not self.power:
            return 1.0
        return float(((self.power / self.tdp - IDLE) / (1 - IDLE)) ** (1 / 3))

    def efficiency(self, dtype: str) -> float:
        """Share of `peak_flops` that large products of `dtype` approach."""
        return float(getattr(self, self.efficiency_of(dtype)))

    def efficiency_of(self, dtype: str) -> str:
        """The field that has the share of `peak_flops` which products of `dtype` approach."""
        own = f"{dtype}_efficiency"
        return "matmul_efficiency" if getattr(self, own, None) is None else own

    def slowed(self, share: float) -> Device:
        """The device with `share` of its arithmetic: of products and attention. What memory
        bounds is as fast as before."""
        own = {name: getattr(self, name) for name in _EFFICIENCIES}
        return replace(
            self, **{name: each and each * share for name, each in own.items()},
            attention={
                name: replace(rate, rate=round(rate.rate * share))
                for name, rate in self.attention.items()
            },
        )


OF_FLOAT32 = {"float64": 2, "complex64": 4, "complex128": 8}
"""The rate of float32 over that of a dtype. A product of complex numbers is four of real ones.
float64 has half the rate on a CPU, all of it on A100 and H100, and a 64th on cards for inference
(NVIDIA's data sheets)."""
IDLE = 0.1
"""Share of its power that an idle GPU draws. nvidia-smi's output in public repositories has 67 to
76 W of an H100's 700, and 50 to 57 of an A100's 400."""
LEAST_POWER = 0.4
"""Share of a device's power below which no cap is believed. nvidia-smi takes 200 W of 700 at least,
where the law of `clocks` has no evidence."""
_EFFICIENCIES = ("matmul_efficiency", "float8_efficiency", "float32_efficiency", "tf32_efficiency")
OF_SOME = ("tf32", "float32_efficiency", "tf32_efficiency", "products_alone", "tdp")
"""Numbers that a device's file may lack."""


def devices() -> tuple[str, ...]:
    """The names of all device presets, sorted."""
    return preset_names("devices")


@cache
def load_device(name: str) -> Device:
    """The device of a preset file."""
    return device_of(preset_table("devices", name))


def device_of(table: Mapping[str, Any]) -> Device:
    """The device of a preset's table, which is taken to be right."""
    attention = {
        kind: AttentionRate(**values(rate)) for kind, rate in table.get("attention", {}).items()
    }
    return Device(
        name=table["name"], node=table.get("node", ""), **values(table), attention=attention,
        figures=tuple(
            figures_of("device.", {key: own for key, own in table.items() if key != "runtime"})
        ),
        runtime=Runtime(
            **values(table["runtime"]), figures=tuple(figures_of("", table["runtime"]))
        ) if "runtime" in table else None,
    )


def power_problem(device: Device, text: str) -> str:
    """The reason for which `device` cannot be capped at the power `text`, with both figures; "" for
    none."""
    try:
        watts = parse_power(text)
    except UnitError as error:
        return error.complaint
    if not device.tdp:
        return f"expected a device whose file says its tdp, found {device.name}, which does not"
    least = ceil(LEAST_POWER * device.tdp)
    if least <= watts <= device.tdp:
        return ""
    return (
        f"expected {least:,} W to {device.tdp:,} W, at least {LEAST_POWER:.0%} of what "
        f"{device.name} may draw, found {watts:,} W"
    )


CARDS = frozenset({"A10", "L4", "L40S", "RTX"})
"""GPU models that are sold only as cards for PCI Express, though their names do not say so."""


def is_called(name: str, by_torch: str) -> bool:
    """True if `by_torch` is torch's name of the GPU `name`: "NVIDIA H100 80GB HBM3" is an "H100 SXM
    80 GB".

    False for a GPU of another memory, or for a card where `name` is none: "NVIDIA H100 PCIe" has
    other clocks and links.
    """
    model, _, _ = re.sub(r"\bSXM\d?\b", "", name.upper()).partition(" GB")
    reported, own = by_torch.upper(), model.split()[:-1] or [model]
    sizes, written = (re.findall(r"(\d+)\s?GB", text.upper()) for text in (reported, name))
    card = re.search("PCIE|NVL", reported) is not None and not CARDS.intersection(own)
    called = {*own} <= {*re.split(r"[^A-Z0-9]+", reported)}
    return called and not card and (not sizes or sizes == written)


_PARSERS: Mapping[str, Callable[[str], int | float]] = {
    "memory": parse_bytes,
    "memory_bandwidth": parse_rate,
    "bandwidth": parse_rate,
    "rank_bandwidth": parse_rate,
    "float32": parse_flop_rate,
    "tf32": parse_flop_rate,
    "bfloat16": parse_flop_rate,
    "float16": parse_flop_rate,
    "float8": parse_flop_rate,
    "rate": parse_flop_rate,
    "tdp": parse_power,
    "power": parse_power,
    "num_sms": int,
    "capability": int,
    "channels": int,
    "nvls_channels": int,
    "capacity": parse_bytes,
    "least_capacity": parse_bytes,
    "most_capacity": parse_bytes,
    "context": parse_bytes,
    "cores": int,
    "thread_bandwidth": parse_rate,
    "devices_per_switch": int,
    "duplex": parse_fraction,
    "read": parse_rate,
    "write": parse_rate,
    "matmul_prologue": int,
    "launch_queue": int,
    "half_length": int,
    "matmul_efficiency": parse_fraction,
    "float8_efficiency": parse_fraction,
    "float32_efficiency": parse_fraction,
    "tf32_efficiency": parse_fraction,
    "products_alone": parse_fraction,
    "memory_efficiency": parse_fraction,
    "elementwise_efficiency": parse_fraction,
    "wave_cost": parse_fraction,
    "backward": parse_fraction,
    "narrow": parse_fraction,
    "interference": parse_fraction,
    "collective_interference": parse_fraction,
    "straggler": parse_fraction,
    "latency": parse_time,
    "kernel": parse_time,
    "collective": parse_time,
    "issue_kernel": parse_time,
    "issue_operator": parse_time,
    "issue_collective": parse_time,
    "issue_hook": parse_time,
    "step_dtensor": parse_time,
    "wake": parse_time,
}


def parsed(key: str, text: str) -> int | float:
    """The number that `text` says for the constant `key`: bytes, bytes/s, FLOP/s, nanoseconds, a
    count or a share.

    KeyError for another key; UnitError or ValueError for a text that says none.
    """
    return _PARSERS[key](text)


def values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one table of a preset; what has no source, such as a name, is left out."""
    return {
        key: parsed(key, entry["value"])
        for key, entry in table.items()
        if isinstance(entry, dict) and "value" in entry
    }


def figures_of(prefix: str, table: Mapping[str, Any]) -> list[PresetFigure]:
    """Every number of a preset's table and of the tables in it."""
    figures: list[PresetFigure] = []
    for key, entry in table.items():
        if not isinstance(entry, dict):
            continue
        if "value" in entry:
            text, provenance, source = entry["value"], entry["provenance"], entry["source"]
            width = parse_fraction(entry["width"]) if "width" in entry else None
            figures.append(
                PresetFigure(
                    key=f"{prefix}{key}", text=text, provenance=provenance, source=source,
                    width=width,
                )
            )
        else:
            figures += figures_of(f"{prefix}{key}.", entry)
    return figures
