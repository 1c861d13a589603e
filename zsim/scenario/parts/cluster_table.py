"""The `cluster` table of a scenario as a ClusterSpec: a preset or a file, and so many nodes of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zsim.cluster.capacity import NIC_ON_SHEET
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.devices import devices, load_device, power_problem
from zsim.errors import ScenarioError, ZsimError
from zsim.io.units import format_rate, parse_power, parse_rate
from zsim.scenario.checks.work_limits import SLOWEST
from zsim.scenario.keys.table_checks import did_you_mean
from zsim.scenario.keys.tables import ClusterTable


def made_cluster(table: ClusterTable, folder: Path | None) -> ClusterSpec:
    """The cluster that `table` names, relative to the scenario's `folder`; ScenarioError, with the
    key, where there is none."""
    if table.file is not None and table.preset is None:
        from zsim.scenario.parts import cluster_file  # start-up: few bring a cluster of their own

        cluster = cluster_file.load(table.file, folder=folder, nodes=table.nodes, ranks=table.ranks)
        return _with_network(cluster, table)
    if table.preset is None or table.file is not None:
        present = "neither" if table.preset is None else "both"
        raise ScenarioError((f"cluster: expected one of preset or file, found {present}; `zsim "
                             f"list clusters` names presets",))
    if table.preset not in clusters():
        hint = did_you_mean(table.preset, list(clusters()))
        raise ScenarioError((f'cluster.preset: unknown cluster "{table.preset[:60]}"{hint}',))
    return _with_network(load_cluster(table.preset, nodes=table.nodes, ranks=table.ranks), table)


def _with_network(cluster: ClusterSpec, table: ClusterTable) -> ClusterSpec:
    """`cluster` with its device, and with all that `table` says of its network."""
    cluster = _with_power(_with_device(cluster, table), table)
    return _with_narrow_nics(_with_fabric(cluster, table), table)


def _with_device(cluster: ClusterSpec, table: ClusterTable) -> ClusterSpec:
    """`cluster` with another GPU in its nodes; ScenarioError for an unknown one, or on CPUs."""
    if table.device is None:
        return cluster
    names = [name for name in devices() if load_device(name).runtime is not None]
    if table.device not in names:
        hint = did_you_mean(table.device, names) or "; `zsim list devices` names those there are"
        raise ScenarioError((f'cluster.device: unknown GPU "{table.device[:60]}"{hint}',))
    if cluster.kind != "cuda":
        raise ScenarioError((f"cluster.device: expected a cluster of GPUs, found {cluster.name}",))
    device, before = load_device(table.device), len(cluster.device.figures)
    power = cluster.device.power if cluster.device.power < device.tdp else 0
    return replace(
        cluster, device=replace(device, power=power),
        figures=(*device.figures, *cluster.figures[before:]),
    )


def _with_power(cluster: ClusterSpec, table: ClusterTable) -> ClusterSpec:
    """`cluster` with its GPUs' draw capped; ScenarioError for a cap that they cannot have."""
    if table.power is None:
        return cluster
    if problem := power_problem(cluster.device, table.power):
        raise ScenarioError((f"cluster.power: {problem}",))
    return replace(cluster, device=replace(cluster.device, power=parse_power(table.power)))


def _with_narrow_nics(cluster: ClusterSpec, table: ClusterTable) -> ClusterSpec:
    """`cluster` with less bandwidth on all of its NICs' links; ScenarioError for more than they
    have."""
    if table.nic_bandwidth is None:
        return cluster
    rail = cluster.links.rail
    most = int(rail.bandwidth * (NIC_ON_SHEET if cluster.nccl else 1))  # data sheets' rates as well
    bandwidth = _rate("cluster.nic_bandwidth", table.nic_bandwidth, most, whose="its NICs'")
    narrow = replace(rail, bandwidth=min(bandwidth, rail.bandwidth))
    return replace(cluster, links=replace(cluster.links, rail=narrow))


def _rate(key: str, text: str, most: int, *, whose: str) -> int:
    """Bytes/s of a link that has at most `most`, which are `whose`; ScenarioError, with the key,
    for another."""
    try:
        bandwidth = parse_rate(text)
    except ZsimError as error:
        raise ScenarioError((f"{key}: {error.complaint}",)) from None
    if not parse_rate(SLOWEST) <= bandwidth <= most:
        expected = f"{SLOWEST} to {format_rate(most)}, {whose}"
        raise ScenarioError((f"{key}: expected {expected}, found {text[:60]}",))
    return bandwidth


def _with_fabric(cluster: ClusterSpec, table: ClusterTable) -> ClusterSpec:
    """`cluster` with another kind of network; ScenarioError for one whose collectives do not know
    any."""
    if table.fabric is None:
        return cluster
    if cluster.nccl is None:
        raise ScenarioError((f"cluster.fabric: expected a cluster whose collectives are NCCL's, "
                             f"found {cluster.name}",))
    return replace(cluster, nccl=replace(cluster.nccl, fabric=table.fabric))
