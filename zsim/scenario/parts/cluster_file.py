"""Clusters from files that anybody may have written, as `zsim calibrate --out` writes them: every
key and number is checked.

A file holds what a cluster preset does, with its device as a table in it (or the name of a device
preset) and perhaps what collectives were measured to take. It says where each number comes from,
since bands follow from that.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import cluster_of
from zsim.cluster.devices import device_of, devices, load_device, power_problem
from zsim.cluster.links import MeasuredCurve
from zsim.cluster.measured_times import MeasuredTimes
from zsim.errors import ScenarioError
from zsim.io import limits
from zsim.io.files import not_a_file
from zsim.io.units import parse_bytes, parse_fraction, parse_time
from zsim.presets import preset_table
from zsim.scenario.keys.table_checks import did_you_mean, validated
from zsim.scenario.parts.cluster_schema import SCOPES, TERMS, cluster_schema

REMEDY = "`zsim calibrate --from FILE… --out MINE.toml` writes a whole file"
LEAST_LEFT = 0.8
"""Least share of a device's memory that its driver leaves; presets have 0.98 and more."""


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
    named = isinstance(table.get("device"), str)
    problems: list[str] = []
    whole = table | {"device": _table_of(table["device"], problems)} if named else table
    validated(cluster_schema(), whole, prefix="", problems=problems)
    problems = problems or [*_contradictions(whole)]
    if problems:
        raise ScenarioError(tuple(
            f"{origin}: {each}" + (f"; {REMEDY}" if each.endswith("found nothing") else "")
            for each in problems
        ))
    device = load_device(table["device"]) if named else device_of(table["device"])
    if "power" in table and (problem := power_problem(device, table["power"]["value"])):
        raise ScenarioError((f"{origin}: power: {problem}",))
    return cluster_of(
        table, name=Path(where).stem, device=device, nodes=nodes, ranks=ranks,
        curves=tuple(_curves(table)), times=tuple(_times(table)),
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


def _table_of(name: str, problems: list[str]) -> Mapping[str, Any]:
    """The table of the device preset `name`, which needs no check but that it is there."""
    if name not in devices():
        problems.append(f'device: unknown device "{name[:60]}"{did_you_mean(name, devices())}')
    return preset_table("devices", name if name in devices() else devices()[0])


def _contradictions(table: Mapping[str, Any]) -> Iterator[str]:
    """Problems of keys that each are right by themselves."""
    library = table["collectives"]
    if library == "nccl" and "nccl" not in table:
        yield "nccl: expected a value, found nothing"
    if library != "gloo" and "times" in table:
        yield f"times: expected none but with collectives of gloo, found {library}"
    for scope, curves in table.get("curves", {}).items():
        for op, curve in curves.items():
            for term in TERMS:
                if (f"added{term}" in curve) != (f"half{term}" in curve):
                    yield f"curves.{scope}.{op}: expected added{term} and half{term}, found one"
    device = table["device"]
    memory = parse_bytes(device["memory"]["value"])
    for name in ("capacity", "least_capacity", "most_capacity") if "runtime" in device else ():
        text = device["runtime"][name]["value"]  # what the driver leaves; vendors' GB may be GiB
        if not LEAST_LEFT * memory <= parse_bytes(text) <= memory * 2**30 / 10**9:
            yield (
                f"device.runtime.{name}: expected nearly the device's memory, "
                f"{device['memory']['value']}, found \"{text}\""
            )


def _curves(table: Mapping[str, Any]) -> Iterator[MeasuredCurve]:
    for scope in SCOPES:
        for op, curve in table.get("curves", {}).get(scope, {}).items():
            texts = {name: entry["value"] for name, entry in curve.items()}
            time = float if scope == "network" else _microseconds
            yield MeasuredCurve(
                scope=scope,  # type: ignore[arg-type]
                collective=op, floor=time(texts["floor"]), share=parse_fraction(texts["share"]),
                added=tuple(
                    (time(texts[f"added{term}"]), parse_bytes(texts[f"half{term}"]))
                    for term in TERMS if f"added{term}" in texts
                ),
                band=parse_fraction(texts["band"]),
                band_middle=parse_fraction(texts.get("band_middle", texts["band"])),
                band_small=parse_fraction(texts.get("band_small", texts["band"])),
                provenance=curve["floor"]["provenance"], source=curve["floor"]["source"],
            )


def _microseconds(text: str) -> float:
    return parse_time(text) / 1000


def _times(table: Mapping[str, Any]) -> Iterator[MeasuredTimes]:
    """The tables `[[times]]`: collectives measured size by size."""
    for each in table.get("times", ()):
        points = zip(map(parse_bytes, each["bytes"]), map(parse_time, each["times"]), strict=True)
        yield MeasuredTimes(
            collective=each["collective"], ranks=each["ranks"], points=tuple(points),
            width=float(parse_fraction(each["width"])), source=each["source"],
        )
