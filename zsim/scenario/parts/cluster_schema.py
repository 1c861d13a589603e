"""Schema of a cluster's file: the keys of the objects that it makes, each number with its source.

Bounds are what a machine can have: beyond them another unit is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, create_model, model_validator

from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.devices import OF_SOME, AttentionRate, Device, Provenance, Runtime, parsed
from zsim.cluster.host import Drives, FileSystem, Host
from zsim.cluster.links import Fabric, Generation, Link, Links, Overheads, Processor
from zsim.engine.execution import AttentionKernels
from zsim.errors import ZsimError
from zsim.io.units import parse_bytes, parse_fraction, parse_time
from zsim.scenario.keys.table import Table

MOST: Mapping[str, float] = {
    "num_sms": 100_000, "launch_queue": 1_000_000, "matmul_prologue": 100_000,
    "half_length": 10_000_000, "cores": 100_000, "devices_per_switch": 1024,
}
TIMES = (
    "kernel", "latency", "collective", "issue_kernel", "issue_operator", "issue_collective",
    "issue_hook", "step_dtensor", "wake",
)
MOST_TIME_NS, MOST_RATE = 10**9, 10**18
MAY_BE_NONE = (
    *("float8", "tf32", "nvls_channels", "matmul_prologue", "launch_queue", "wave_cost"),
    *("interference", "collective_interference", "straggler", *TIMES),
)
SHARES = (
    *("_efficiency", "_alone", "wave_cost", "backward", "narrow", "interference", "straggler"),
    "duplex",
)
LEAST_WIDTH, MOST_WIDTH = 0.08, 0.9
"""Half-widths that a band may have, as shares. No calibration on steps is known to be worth more
than the presets' own; beyond the other end a time says nothing."""
SCOPES: Mapping[str, tuple[str, ...]] = {
    "ring": ("all_gather", "reduce_scatter", "all_reduce"),
    "nvls": ("all_reduce",),
    "network": ("all_gather", "reduce_scatter", "all_reduce"),
}
"""Links on which curves hold, and their collectives."""
TERMS = ("", "_2", "_3", "_4")
"""Endings of the keys of what a curve's messages add."""
Text = Annotated[str, Field(max_length=4000)]
Count = Annotated[int, Field(ge=1, le=1024)]


def _amount(parse: Callable[[str], float], *, least: float, most: float) -> AfterValidator:
    """The check of a text with a number and its unit."""

    def fits(text: str) -> str:
        try:
            number = parse(text)
        except (ZsimError, ValueError, ArithmeticError):
            raise ValueError("expected a number with its unit") from None
        if not least <= number <= most:
            raise ValueError(f"expected {least:g} to {most:g}")
        return text

    return AfterValidator(fits)


_Share = Annotated[str, _amount(parse_fraction, least=LEAST_WIDTH, most=MOST_WIDTH)]


def _device_name(text: str) -> str:
    if not re.fullmatch(r"[\w .+-]{1,80}", text):
        raise ValueError("expected letters, digits and blanks")
    return text


class Number(Table):
    """A number that says what it is from."""

    value: Text
    provenance: Provenance
    source: Text


class DeviceNumber(Number):
    """A device's number, which may say how far off its calibration was."""

    width: _Share | None = None

    @model_validator(mode="after")
    def _is_calibrated(self) -> DeviceNumber:
        if self.width is not None and self.provenance != "calibrated":
            raise ValueError("expected a width beside what is calibrated only")
        return self


def _table(name: str, keys: dict[str, Any], *, base: Any = Table) -> Any:
    """The schema of a table with these keys, each with its type and its default."""
    return create_model(name, __base__=base, **keys)


def _number(parse: Callable[[str], float], *, least: float, most: float, base: Any) -> Any:
    amount = Annotated[str, _amount(parse, least=least, most=most)]
    return _table("number", {"value": (amount, ...)}, base=base)


def _constant(name: str, *, base: Any = Number) -> Any:
    """The schema of the constant `name`, within what a machine can have."""
    if name in TIMES:
        most: float = MOST_TIME_NS
    else:
        most = 1.0 if name.endswith(SHARES) else MOST.get(name, MOST_RATE)
    least = 0.0 if name in MAY_BE_NONE else 1e-9
    return _number(partial(parsed, name), least=least, most=most, base=base)


def _constants(
    kind: Any, *, base: Any = Number, but: tuple[str, ...] = (), **others: Any
) -> Any:
    """The schema of the constants that make a `kind`; those with a default may be left out."""
    keys = {
        field.name: (_constant(field.name, base=base), ...) if field.default is MISSING
        else (_constant(field.name, base=base) | None, None)
        for field in fields(kind) if field.name not in (*but, *others)
    }
    return _table(kind.__name__, keys | others)


def _curve(scope: str) -> Any:
    """The schema of a curve: times in µs inside a node, in multiples of the tuner's latency on a
    network."""
    time: Callable[[str], float] = float if scope == "network" else parse_time
    made = partial(_number, base=Number)
    micro = 1.0 if scope == "network" else 1000.0
    band = made(parse_fraction, least=0.01, most=0.9)
    added = made(time, least=0, most=1e6 * micro)
    half = made(parse_bytes, least=1, most=2**44)
    keys: dict[str, Any] = {
        "floor": (added, ...), "share": (made(parse_fraction, least=0.01, most=2), ...),
        "band": (band, ...), "band_middle": (band | None, None), "band_small": (band | None, None),
    }
    for term in TERMS:
        keys |= {f"added{term}": (added | None, None), f"half{term}": (half | None, None)}
    return _table("curve", keys)


class NcclTable(Table):
    """NCCL's view of a node."""

    generation: Generation
    fabric: Fabric
    processor: Processor
    links: Literal["nvlink", "pcie"]


class TimesTable(Table):
    """A collective that was measured size by size."""

    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    ranks: Count
    bytes: tuple[Annotated[str, _amount(parse_bytes, least=1, most=2**44)], ...]
    times: tuple[Annotated[str, _amount(parse_time, least=1, most=10**12)], ...]
    width: _Share
    provenance: Literal["measured"]
    source: Text

    @model_validator(mode="after")
    def _has_a_time_for_each_size(self) -> TimesTable:
        sizes = [parse_bytes(text) for text in self.bytes]
        if not 1 <= len(sizes) == len(self.times) <= 64 or sorted(set(sizes)) != sizes:
            raise ValueError("expected 1 to 64 ascending bytes, as many as times")
        return self


@cache
def cluster_schema() -> type[BaseModel]:
    """The schema of a whole file whose device is a table."""
    of_device = partial(_constants, base=DeviceNumber)
    rates = {name: (of_device(AttentionRate) | None, None) for name in get_args(AttentionKernels)}
    unset = [f.name for f in fields(Device) if f.default is not MISSING and f.name not in OF_SOME]
    device = of_device(
        Device, but=(*unset, "figures"),
        name=(Annotated[str, AfterValidator(_device_name)], ...), node=(Text, ""),
        attention=(_table("attention", rates), {}),
        runtime=(of_device(Runtime, but=("figures",)) | None, None),
    )
    links = {field.name: (_constants(Link), ...) for field in fields(Links)}
    curves = {
        scope: (_table(scope, {op: (_curve(scope) | None, None) for op in ops}) | None, None)
        for scope, ops in SCOPES.items()
    }
    keys: dict[str, Any] = {
        "description": (Text, ...), "kind": (Literal["cpu", "cuda"], ...), "device": (device, ...),
        "collectives": (Literal.__getitem__(tuple(LIBRARIES)), ...),
        "devices_per_node": (Count, ...), "nics_per_node": (Count, ...),
        "links": (_table("links", links), ...),
        "host": (_constants(Host, memory_bandwidth=(_constant("memory_bandwidth"), ...)), ...),
        "overheads": (_constants(Overheads), ...), "nccl": (NcclTable | None, None),
        "curves": (_table("curves", curves) | None, None),
        "times": (Annotated[tuple[TimesTable, ...], Field(max_length=64)], ()),
        "power": (_constant("power") | None, None),
        "drives": (_constants(Drives) | None, None),
        "file_system": (_constants(FileSystem) | None, None),
    }
    schema: type[BaseModel] = _table("cluster", keys)
    return schema
