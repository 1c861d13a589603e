"""Clusters from files that anybody may have written, as `zsim calibrate --out` writes them: every
key and number is checked.

A file holds what a cluster preset does, with its device as a table in it (or the name of a device
preset) and perhaps what collectives were measured to take. It says where each number comes from,
since bands follow from that.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from zsim.cluster.cluster import (
    ClusterSpec,
    Fabric,
    Generation,
    Link,
    Links,
    MeasuredCurve,
    Overheads,
    Processor,
    cluster_of,
)
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.devices import (
    OF_SOME,
    AttentionRate,
    Device,
    Provenance,
    Runtime,
    device_of,
    devices,
    load_device,
    parsed,
    power_problem,
)
from zsim.cluster.file_system import FileSystem
from zsim.cluster.host import Drives
from zsim.cluster.measured_times import MeasuredTimes
from zsim.engine.execution import AttentionKernels
from zsim.errors import ScenarioError, ZsimError, shown
from zsim.io import limits
from zsim.io.files import not_a_file
from zsim.io.units import parse_bytes, parse_fraction, parse_time

REMEDY = "`zsim calibrate --from FILE… --out MINE.toml` writes a whole file"
MOST_TEXT = 4000
MOST_DEVICES = 1024
MOST_TERMS = 4
MOST_TIMES, MOST_POINTS = 64, 64
MOST: Mapping[str, float] = {
    "num_sms": 100_000, "launch_queue": 1_000_000, "matmul_prologue": 100_000,
    "half_length": 10_000_000, "cores": 100_000, "devices_per_switch": 1024,
}
MOST_TIME_NS = 10**9
OPTIONAL = ("step_dtensor", "wake")
"""Overheads that only clusters of CPUs have."""
OF_HOST = ("memory", "cores", "thread_bandwidth", "devices_per_switch")
"""Properties of a host that a file may leave out; offloading needs them."""
LEAST_WIDTH, MOST_WIDTH = 0.08, 0.9
"""Half-widths that a band may have, as shares. No calibration on steps is known to be worth more
than the presets' own; beyond the other end a time says nothing."""
MOST_RATE = 10**18
LEAST_LEFT = 0.8
"""Least share of a device's memory that its driver leaves; presets have 0.98 and more."""
TIMES = (
    "kernel", "latency", "collective", "issue_kernel", "issue_collective", "issue_hook",
    "step_dtensor", "wake",
)
MAY_BE_NONE = (
    *("float8", "tf32", "nvls_channels", "matmul_prologue", "launch_queue", "wave_cost"),
    *("interference", "collective_interference", "straggler", *TIMES),
)
SHARES = ("_efficiency", "_alone", "wave_cost", "backward", "narrow", "interference", "straggler")
TOP = (
    "description", "kind", "device", "collectives", "devices_per_node", "nics_per_node", "links",
    "host", "overheads",
)
SCOPES: Mapping[str, tuple[str, ...]] = {
    "ring": ("all_gather", "reduce_scatter", "all_reduce"),
    "nvls": ("all_reduce",),
    "network": ("all_gather", "reduce_scatter", "all_reduce"),
}
"""Links on which curves hold, and their collectives."""


def load(path: str, *, folder: Path | None, nodes: int, ranks: int | None) -> ClusterSpec:
    """The cluster of the file at `path`, relative to the scenario's `folder`; ScenarioError, with
    the key, for anything odd in it."""
    return parse(
        _read((folder or Path()) / path, path[:200]), where=path[:200], nodes=nodes, ranks=ranks
    )


def parse(data: bytes, *, where: str, nodes: int = 1, ranks: int | None = None) -> ClusterSpec:
    """The cluster in `data`; `where` names it in messages."""
    origin = f"cluster.file: {where}"
    text = limits.check_text(data, where=origin)
    try:
        table = tomllib.loads(text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ScenarioError((f"{origin}: not TOML: {str(error)[:200]}",)) from None
    check = _Checked(origin)
    curves, times = _require_cluster(check, table)
    device = (
        load_device(table["device"])
        if isinstance(table["device"], str)
        else device_of(table["device"])
    )
    if "power" in table and (problem := power_problem(device, table["power"]["value"])):
        raise ScenarioError((f"{origin}: power: {problem}",))
    return cluster_of(
        table, name=Path(where).stem, device=device, nodes=nodes, ranks=ranks, curves=curves,
        times=times,
    )


def _read(file: Path, path: str) -> bytes:
    try:
        if not file.is_file():
            raise ScenarioError((f"cluster.file: {path}: {not_a_file(file)}; it is looked for "
                                 f"beside the scenario",))
        with file.open("rb") as stream:
            return stream.read(limits.MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ScenarioError((f"cluster.file: {path}: cannot be read: "
                             f"{getattr(error, 'strerror', None) or error}",)) from None


class _Checked:
    """Checks of one file's values, each named by its key in messages."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def wrong(self, key: str, expected: str, value: object) -> ScenarioError:
        """The error for the value at `key`."""
        return ScenarioError((f"{self.origin}: {key[:100]}: expected {expected}, found "
                              f"{shown(value)}; {REMEDY}",))

    def table(
        self, key: str, value: object, needed: Collection[str], allowed: Collection[str] = ()
    ) -> dict[str, Any]:
        """A table with all keys that are needed, and no others than those allowed."""
        if not isinstance(value, dict):
            raise self.wrong(key or "file", "a table", value)
        prefix = f"{key}." if key else ""
        for name in value:
            if name not in needed and name not in allowed:
                near = difflib.get_close_matches(name, [*needed, *allowed], n=1)
                hint = (
                    f", did you mean {near[0]}?"
                    if near
                    else f"; expected {', '.join([*needed, *allowed])}"
                )
                raise ScenarioError((f"{self.origin}: {prefix}{name[:60]}: unknown key{hint}",))
        for name in needed:
            if name not in value:
                raise ScenarioError((f"{self.origin}: {prefix}{name}: missing; {REMEDY}",))
        return value

    def text(self, key: str, value: object) -> str:
        """A text of at most `MOST_TEXT` characters."""
        if not isinstance(value, str) or len(value) > MOST_TEXT:
            raise self.wrong(key, f"a text of at most {MOST_TEXT:,} characters", value)
        return value

    def one_of(self, key: str, value: object, choices: Collection[str]) -> str:
        """One of `choices`."""
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}", value)
        return value

    def count(self, key: str, value: object) -> int:
        """A count of a node's devices or NICs."""
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_DEVICES:
            raise self.wrong(key, f"a whole number from 1 to {MOST_DEVICES}", value)
        return value

    def entry(self, key: str, value: object, *, of_device: bool = False) -> str:
        """The text of a number that says what it is from; of a device it may say how far off its
        calibration was."""
        entry = self.table(
            key, value, ("value", "provenance", "source"), ("width",) if of_device else ()
        )
        self.one_of(f"{key}.provenance", entry["provenance"], get_args(Provenance))
        self.text(f"{key}.source", entry["source"])
        if "width" in entry:
            self.width(f"{key}.width", entry["width"], entry["provenance"])
        return self.text(f"{key}.value", entry["value"])

    def width(self, key: str, value: object, provenance: str) -> None:
        """The half-width of a calibrated constant: a share within what a calibration can be worth.
        """
        if provenance != "calibrated":
            raise self.wrong(
                key, "one beside what is calibrated only",
                f"{value} beside what is {provenance}"[:200],
            )
        text = self.text(key, value)
        try:
            share = parse_fraction(text)
        except (ZsimError, ValueError, ArithmeticError):
            raise self.wrong(key, "a share in percent", text) from None
        if not isfinite(share) or not LEAST_WIDTH <= share <= MOST_WIDTH:
            raise self.wrong(key, f"{LEAST_WIDTH:.0%} to {MOST_WIDTH:.0%}", text)

    def constants(
        self, key: str, value: object, names: Collection[str], allowed: Collection[str] = ()
    ) -> dict[str, Any]:
        """A table of constants, each a number with its unit, within what a machine can have."""
        table = self.table(key, value, names, allowed)
        for name in names:
            text = self.entry(f"{key}.{name}", table[name], of_device=key.startswith("device"))
            try:
                number = parsed(name, text)
            except (ZsimError, ValueError, ArithmeticError):
                raise self.wrong(f"{key}.{name}", "a number with its unit", text) from None
            if not (0 if name in MAY_BE_NONE else 1e-9) <= number <= _most(name):
                raise self.wrong(
                    f"{key}.{name}", f"at most {_most(name):g}, and more than nothing", text
                )
        return table


def _most(name: str) -> float:
    if name in TIMES:
        return MOST_TIME_NS
    return 1.0 if name.endswith(SHARES) else MOST.get(name, MOST_RATE)


def _require_cluster(
    check: _Checked, table: dict[str, Any]
) -> tuple[tuple[MeasuredCurve, ...], tuple[MeasuredTimes, ...]]:
    """Everything checked; what is returned are curves and times, since nothing else makes them."""
    check.table("", table, TOP, ("nccl", "curves", "times", "power", "drives", "file_system"))
    check.text("description", table["description"])
    check.one_of("kind", table["kind"], ("cpu", "cuda"))
    library = check.one_of("collectives", table["collectives"], tuple(LIBRARIES))
    for name in ("devices_per_node", "nics_per_node"):
        check.count(name, table[name])
    links = check.table("links", table["links"], [field.name for field in fields(Links)])
    for name in links:
        check.constants(f"links.{name}", links[name], [field.name for field in fields(Link)])
    of_host = check.table("host", table["host"], ("memory_bandwidth",), OF_HOST)
    check.constants("host", of_host, tuple(of_host))
    if "drives" in table:
        check.constants("drives", table["drives"], [field.name for field in fields(Drives)])
    if "file_system" in table:
        names = [field.name for field in fields(FileSystem)]
        check.constants("file_system", table["file_system"], names)
    needed = [field.name for field in fields(Overheads) if field.default is MISSING]
    optional = [name for name in OPTIONAL if name in check.table("overheads", table["overheads"],
                                                                 needed, OPTIONAL)]
    check.constants("overheads", table["overheads"], [*needed, *optional])
    _require_device(check, table["device"])
    if "power" in table:
        check.constants("power", {"power": table["power"]}, ("power",))
    if library == "nccl" or "nccl" in table:
        _require_nccl(check, table.get("nccl"))
    return tuple(_curves(check, table.get("curves", {}))), tuple(
        _times(check, table.get("times", []), library)
    )


def _require_device(check: _Checked, value: object) -> None:
    if isinstance(value, str):
        check.one_of("device", value, devices())
        return
    names = [
        field.name for field in fields(Device)
        if field.default is MISSING and field.name not in ("name", "attention", "figures")
    ]
    names += [name for name in OF_SOME if isinstance(value, dict) and name in value]
    table = check.constants("device", value, names, ("name", "node", "attention", "runtime"))
    check.text("device.node", table.get("node", ""))
    if not re.fullmatch(r"[\w .+-]{1,80}", check.text("device.name", table.get("name"))):
        raise check.wrong("device.name", "letters, digits and blanks", table["name"])
    if "runtime" in table:
        own = [field.name for field in fields(Runtime) if field.name != "figures"]
        _require_capacity(check, table, check.constants("device.runtime", table["runtime"], own))
    attention = check.table(
        "device.attention", table.get("attention", {}), (), get_args(AttentionKernels)
    )
    for kind in attention:
        check.constants(
            f"device.attention.{kind}", attention[kind],
            [
                field.name for field in fields(AttentionRate)
                if field.default is MISSING or field.name in attention[kind]
            ],
        )


def _require_capacity(check: _Checked, device: dict[str, Any], table: dict[str, Any]) -> None:
    """CUDA reports what the driver leaves of the memory, of which vendors' GB may be GiB."""
    written = device["memory"]["value"]
    memory = parse_bytes(written)
    for name in ("capacity", "least_capacity", "most_capacity"):
        text = table[name]["value"]
        if not LEAST_LEFT * memory <= parse_bytes(text) <= memory * 2**30 / 10**9:
            raise check.wrong(
                f"device.runtime.{name}", f"nearly the device's memory, {written}", text
            )


def _require_nccl(check: _Checked, value: object) -> None:
    table = check.table("nccl", value, ("generation", "fabric", "processor", "links"))
    literals = (("generation", Generation), ("fabric", Fabric), ("processor", Processor))
    for name, literal in literals:
        check.one_of(f"nccl.{name}", table[name], get_args(literal))
    check.one_of("nccl.links", table["links"], ("nvlink", "pcie"))


def _curves(check: _Checked, value: object) -> list[MeasuredCurve]:
    curves = []
    for scope, inside in check.table("curves", value, (), tuple(SCOPES)).items():
        for op, table in check.table(f"curves.{scope}", inside, (), SCOPES[scope]).items():
            curves.append(_curve(check, f"curves.{scope}.{op}", table, scope, op))
    return curves


def _times(check: _Checked, value: object, library: str) -> Iterator[MeasuredTimes]:
    """The tables `[[times]]`: collectives measured size by size."""
    if value and library != "gloo":
        raise check.wrong("times", "none but with collectives of gloo", library)
    if not isinstance(value, list) or len(value) > MOST_TIMES:
        raise check.wrong("times", f"at most {MOST_TIMES} tables", value)
    for index, each in enumerate(value):
        key = f"times[{index}]"
        table = check.table(
            key, each, ("collective", "ranks", "bytes", "times", "width", "provenance", "source")
        )
        check.one_of(f"{key}.provenance", table["provenance"], ("measured",))
        sizes = _numbers(check, f"{key}.bytes", table["bytes"], parse_bytes, most=2**44)
        lasting = _numbers(check, f"{key}.times", table["times"], parse_time, most=10**12)
        if len(sizes) != len(lasting) or sorted(set(sizes)) != sizes:
            raise check.wrong(f"{key}.bytes", "ascending sizes, as many as times", table["bytes"])
        width = check.text(f"{key}.width", table["width"])
        check.width(f"{key}.width", width, "calibrated")
        yield MeasuredTimes(
            collective=check.one_of(
                f"{key}.collective", table["collective"],
                ("all_gather", "reduce_scatter", "all_reduce", "broadcast"),
            ),
            ranks=check.count(f"{key}.ranks", table["ranks"]),
            points=tuple(zip(sizes, lasting, strict=True)), width=float(parse_fraction(width)),
            source=check.text(f"{key}.source", table["source"]),
        )


def _numbers(
    check: _Checked, key: str, value: object, parse: Callable[[str], int], *, most: int
) -> list[int]:
    """The numbers of a list of texts with units, each from 1 to `most`."""
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_POINTS:
        raise check.wrong(key, f"a list of 1 to {MOST_POINTS} texts with units", value)
    numbers = []
    for index, each in enumerate(value):
        text = check.text(f"{key}[{index}]", each)
        try:
            number = parse(text)
        except (ZsimError, ValueError, ArithmeticError):
            raise check.wrong(f"{key}[{index}]", "a number with its unit", text) from None
        if not 1 <= number <= most:
            raise check.wrong(f"{key}[{index}]", f"1 to {most:,}", text)
        numbers.append(number)
    return numbers


def _curve(check: _Checked, key: str, value: object, scope: Any, op: str) -> MeasuredCurve:
    terms = [
        suffix
        for suffix in ("", "_2", "_3", "_4")[:MOST_TERMS]
        if isinstance(value, dict) and f"added{suffix}" in value
    ]
    by_size = [
        name for name in ("band_middle", "band_small") if isinstance(value, dict) and name in value
    ]
    names = (
        "floor", "share", "band", *by_size,
        *(f"{part}{suffix}" for suffix in terms for part in ("added", "half")),
    )
    table = check.table(key, value, names)
    texts = {name: check.entry(f"{key}.{name}", table[name]) for name in names}

    def number(name: str, least: float, most: float) -> float:
        try:
            amount = _curve_number(name, texts[name], scope)
        except (ZsimError, ValueError, ArithmeticError):
            raise check.wrong(f"{key}.{name}", "a number with its unit", texts[name]) from None
        if not isfinite(amount) or not least <= amount <= most:
            raise check.wrong(f"{key}.{name}", f"{least:g} to {most:g}", texts[name])
        return amount

    bands = {name: number(name, 0.01, 0.9) for name in ("band", *by_size)}
    return MeasuredCurve(
        scope=scope, collective=op, floor=number("floor", 0, 1e6), share=number("share", 0.01, 2),
        added=tuple(
            (number(f"added{suffix}", 0, 1e6), int(number(f"half{suffix}", 1, 2**44)))
            for suffix in terms
        ),
        band=bands["band"], band_middle=bands.get("band_middle", bands["band"]),
        band_small=bands.get("band_small", bands["band"]), provenance=table["floor"]["provenance"],
        source=table["floor"]["source"],
    )


def _curve_number(name: str, text: str, scope: str) -> float:
    """Bytes, shares, and times: in µs inside a node, in multiples of the tuner's latency on a
    network."""
    if name.startswith("half"):
        return parse_bytes(text)
    if name == "share" or name.startswith("band"):
        return parse_fraction(text)
    return float(text) if scope == "network" else parse_time(text) / 1000
