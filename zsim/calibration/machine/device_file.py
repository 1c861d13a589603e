"""The file of a node of GPUs: a preset's cluster with the constants that were fitted here.

`--cluster FILE` reads it. The presets that a GPU begins with are found by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zsim.calibration.fitting import write_cluster
from zsim.calibration.fitting.planned_steps import PRODUCTS
from zsim.calibration.fitting.write_cluster import Stamp, scaled
from zsim.calibration.machine import machine_file
from zsim.calibration.machine.device_fit import PACED, FittedConstant, FittedDevice
from zsim.calibration.machine.fit import MachineError
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.devices import devices, is_called, load_device
from zsim.errors import listed
from zsim.presets import preset_table
from zsim.runs.backend import Gpus
from zsim.scenario.scenario import Scenario

NODE = "# node: "
"""Beginning of the comment that names the preset of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The presets that a node's constants begin at: its cluster's and its GPU's names."""

    cluster: str
    device: str

    def with_ranks(self, ranks: int) -> ClusterSpec:
        """One node with a rank on each of `ranks` GPUs."""
        return replace(load_cluster(self.cluster, ranks=ranks), device=load_device(self.device))


def base_of(gpus: Gpus, preset: str) -> Base:
    """The presets of such GPUs in nodes of the cluster `preset`, "" for those that they are sold
    in; MachineError where there are none."""
    known = {name: load_device(name) for name in devices()}
    device = next((name for name, own in known.items() if is_called(own.name, gpus.name)), "")
    if not device:
        raise MachineError(
            where="this machine", expected=f"a GPU of {listed(known)}", found=gpus.name[:80],
            remedy="validate with the nearest of them as the scenario's cluster.device, or with "
                   "--cluster FILE.toml, your own copy of a cluster with the vendor's figures",
        )
    cluster = preset or known[device].node
    if not cluster:
        raise MachineError(
            where="this machine", expected="a node that GPUs of this name are sold in",
            found=f"none for {gpus.name[:80]}",
            remedy="--cluster PRESET, one of `zsim list clusters`, as pcie-box",
        )
    if load_cluster(cluster).kind != "cuda":
        raise MachineError(
            where="--cluster", expected="a cluster of GPUs", found=cluster,
            remedy="`zsim list clusters`",
        )
    return Base(cluster=cluster, device=device)


def text(fitted: FittedDevice, base: Base, *, source: str, seconds: float) -> str:
    """The node's cluster as TOML, each constant with its provenance, and how good they are.

    The host's times are of calls alone, not of a trainer's step: their bands stay as wide as any
    measurement's.
    """
    whole, _ = write_cluster.preset_tables(base.cluster)
    whole["device"] = preset_table("devices", base.device)
    whole.pop("power", None)  # constants are of the clocks that they were measured at
    whole["description"] = f"This machine: {source.partition(' on ')[2]}"
    for constant in fitted.constants:
        table, name = _place(whole, constant.key)
        table[name] = scaled(table[name], constant.factor, _stamp(constant, source))
        if name == PRODUCTS:
            table |= write_cluster.moved_with_products(table, constant.factor)
    if fitted.curves:
        whole["curves"] = write_cluster.curve_tables(fitted.curves)
    head = (*_head(fitted, source, seconds), f"{NODE}{base.cluster}")
    lines = [*head, *write_cluster.toml_of("", whole)]
    return "\n".join(lines) + "\n"


def node_of(path: Path) -> str:
    """The preset of the node in a file that `text` made; "" where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(NODE) for line in lines if line.startswith(NODE)), "")


def _place(whole: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *path, name = key.split(".")
    for part in path:
        whole = whole[part]
    return whole, name


def _stamp(constant: FittedConstant, source: str) -> Stamp:
    doubt = f"; doubtful: {constant.doubt}" if constant.doubt else ""
    if constant.key.removeprefix("overheads.") in PACED:
        source = f"the preset's by the pace of overheads.issue_kernel, {source}"
        return Stamp(source=source, about={"provenance": "assumed"})
    about = {"provenance": "measured"}
    if constant.key.startswith("device."):
        about = {"provenance": "calibrated", "width": f"{100 * constant.width:.1f} %"}
    return Stamp(source=f"{len(constant.errors)} kernels, {source}{doubt}", about=about)


def _head(fitted: FittedDevice, source: str, seconds: float) -> Iterator[str]:
    """Comments: how it was measured, and how far off kernels are when others predict them."""
    yield f"# {source}, in {seconds:.0f} s"
    for constant in fitted.constants:
        yield (
            f"# {constant.key}: {len(constant.errors)} kernels, each predicted by the others: most "
            f"{max(map(abs, constant.errors)):.1%}; spread of equal calls {constant.spread:.1%}"
        )
    if fitted.without_curves:
        yield f"# {fitted.without_curves}"
    yield from write_cluster.head(None, fitted.curves, source)


def source_of(gpus: Gpus, world_size: int, date: str) -> str:
    """The sentence that says where measured constants come from."""
    versions = f"torch {machine_file.torch_version()}, NCCL {gpus.nccl}, driver {gpus.driver[:80]}"
    return (
        f"zsim calibrate --here on {world_size} of {gpus.count} {gpus.name[:80]}, "
        f"{machine_file.processor()}, {versions}, {date}"
    )


def unfit(cluster: ClusterSpec, scenario: Scenario) -> str:
    """The reason that the file of this machine's GPUs says nothing of `scenario`; "" where it does.
    """
    own = scenario.cluster
    if own.kind == "cuda" and own.device.name != cluster.device.name:
        return f"{cluster.device.name} here, {own.device.name} in the scenario"
    if own.kind == "cuda" and own.num_nodes > 1:
        return f"one node here, {own.num_nodes} in the scenario"
    if scenario.world_size > cluster.devices_per_node:
        return f"{cluster.devices_per_node} GPUs here, {scenario.world_size} in the scenario"
    return ""
