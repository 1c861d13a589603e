"""Clusters from preset files, and from tables like theirs, each number with its source."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.devices import Device, figures_of, load_device, values
from zsim.cluster.host import Drives, FileSystem, Host
from zsim.cluster.links import Link, Links, MeasuredCurve, Nccl, Overheads
from zsim.cluster.measured_times import MeasuredTimes
from zsim.errors import ScenarioError
from zsim.io.units import parse_power
from zsim.presets import preset_names, preset_table


def clusters() -> tuple[str, ...]:
    """The names of all cluster presets, sorted."""
    return preset_names("clusters")


@lru_cache(maxsize=16)
def load_cluster(name: str, *, nodes: int = 1, ranks: int | None = None) -> ClusterSpec:
    """`nodes` nodes of the preset `name`, with a rank on each device or on the first `ranks` of
    them.

    A CPU host has as many devices as it has ranks. ScenarioError for an unknown name or for more
    ranks than devices.
    """
    if name not in clusters():
        near = difflib.get_close_matches(name, clusters(), n=1)
        hint = f", did you mean {near[0]}?" if near else "; `zsim list clusters` names them"
        raise ScenarioError((f'cluster.preset: unknown cluster "{name[:60]}"{hint}',))
    table = _preset(name)
    return cluster_of(
        table, name=name, device=load_device(table["device"]), nodes=nodes, ranks=ranks
    )


def cluster_of(
    table: Mapping[str, Any],
    *,
    name: str,
    device: Device,
    nodes: int,
    ranks: int | None,
    curves: tuple[MeasuredCurve, ...] = (),
    times: tuple[MeasuredTimes, ...] = (),
) -> ClusterSpec:
    """The cluster of a preset's table, which is taken to be right; ScenarioError for more ranks
    than devices."""
    per_node = int(table["devices_per_node"])
    if table["kind"] == "cpu":
        per_node = -(-(ranks or nodes) // nodes)
    num_ranks = nodes * per_node if ranks is None else ranks
    if not 1 <= num_ranks <= nodes * per_node:
        raise ScenarioError(
            (f"cluster.ranks: expected 1 to {nodes * per_node}, the devices of {nodes} × {name}, "
             f"found {num_ranks}",)
        )
    figures = figures_of(
        "", {key: entry for key, entry in table.items() if key not in ("device", "curves")}
    )
    host = values(table["host"])
    if "power" in table:
        device = replace(device, power=parse_power(table["power"]["value"]))
    return ClusterSpec(
        name=name,
        description=table["description"],
        kind=table["kind"],
        collectives=table["collectives"],
        devices_per_node=per_node,
        nics_per_node=table["nics_per_node"],
        num_nodes=nodes,
        num_ranks=num_ranks,
        device=device,
        links=Links(**{kind: Link(**values(link)) for kind, link in table["links"].items()}),
        host_memory_bandwidth=host.pop("memory_bandwidth"),
        host=Host(**host),
        drives=Drives(**values(table["drives"])) if "drives" in table else None,
        file_system=(
            FileSystem(**values(table["file_system"])) if "file_system" in table else None
        ),
        overheads=Overheads(**values(table["overheads"])),
        figures=(*device.figures, *figures),
        nccl=Nccl(**table["nccl"]) if "nccl" in table else None,
        curves=curves,
        times=times,
    )


@cache
def _preset(name: str) -> dict[str, Any]:
    return preset_table("clusters", name)
