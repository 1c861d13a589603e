"""The cluster that predicts real ranks: this machine as it was calibrated, a preset of its GPUs, or
the shaped links of a testbed."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, cast

from zsim.calibration.machine import device_file, machine_file, shaped
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.errors import ArgumentError, ZsimError
from zsim.io.arguments import choice_of, path_of
from zsim.io.files import obstacle
from zsim.runs import fault_support, simulator
from zsim.runs.backend import Backend, Capabilities, Gpus, MeasuringBackend, RunOptions
from zsim.runs.modes import COMPUTE_MODES, ComputeMode
from zsim.scenario.parts import cluster_file
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.cluster.testbed import Layout


def find_machine(
    capabilities: Capabilities, scenario: Scenario, cluster: str | PathLike[str] | None
) -> Path | None:
    """The cluster file of this machine: `cluster`, else the file of `zsim calibrate --here` in the
    user's cache.

    None without one, or where the file of this machine's GPUs does not fit the scenario.
    """
    if cluster is not None:
        remedy = "`zsim calibrate --here --out FILE.toml` writes one"
        path = path_of(
            cluster, where="cluster", expected="the path of a cluster's file", remedy=remedy
        )
        if not path.is_file():
            raise ArgumentError(
                where=f"cluster: {path}", expected="a cluster's file", found=obstacle(path),
                remedy=remedy,
            )
        return path
    cached = machine_file.cached(scenario.world_size, capabilities.gpus)
    if capabilities.gpus is not None:
        return None if reason_for_preset(capabilities.gpus, scenario) else cached
    return cached if capabilities.device == "cpu" and cached.is_file() else None


def load_machine(scenario: Scenario, machine: Path | None) -> ClusterSpec | None:
    """The cluster of the file `machine` with the scenario's ranks; None without a file."""
    if machine is None:
        return None
    return cluster_file.load(str(machine), folder=None, nodes=1, ranks=scenario.world_size)


def reason_for_preset(gpus: Gpus, scenario: Scenario) -> str:
    """The reason that times are those of a preset and not of this machine's GPUs; "" where the
    file of a calibration has them."""
    cached = machine_file.cached(scenario.world_size, gpus)
    if not cached.is_file():
        return "not calibrated here; `zsim calibrate --here --backend nccl` does"
    cluster = cluster_file.load(str(cached), folder=None, nodes=1, ranks=None)
    return device_file.unfit(cluster, scenario)


def preset_of_gpus(scenario: Scenario, capabilities: Capabilities) -> ClusterSpec | None:
    """The preset of this machine's GPUs with the scenario's ranks, where the scenario names other
    devices and there is one."""
    if capabilities.gpus is None or scenario.cluster.kind == capabilities.device:
        return None
    try:
        preset = device_file.base_of(capabilities.gpus, "").cluster
    except ZsimError:  # a GPU of another name: the default cluster, whose time is not judged
        return None
    return simulator.cluster_for(scenario, capabilities.device, preset=preset)


def shape_links(
    backend: Backend, scenario: Scenario, base: ClusterSpec | None, options: RunOptions, *,
    testbed: Layout | None, compute: ComputeMode,
) -> tuple[ClusterSpec | None, RunOptions]:
    """The cluster that predicts ranks on `testbed` with such `compute`, and options to run them.

    `base` is this machine's; it is returned where there are neither. The scenario's slow links are
    slow on the testbed too.
    """
    choice_of(compute, COMPUTE_MODES, where="compute")
    if compute == "emulated":  # which options may refuse, before links are measured
        known = base or load_cluster("cpu-gloo", ranks=scenario.world_size)
        options = replace(options, emulated_on=known)
    testbed = testbed and fault_support.on_testbed(scenario, testbed)
    cluster = _shaped_cluster(backend, scenario, base, testbed)
    if options.emulated_on is not None:
        cluster = (cluster or options.emulated_on).with_idle_cores
        options = replace(options, emulated_on=cluster)
    return cluster, replace(options, testbed=testbed)


def _shaped_cluster(
    backend: Backend, scenario: Scenario, base: ClusterSpec | None, testbed: Layout | None
) -> ClusterSpec | None:
    """The cluster `base` on the links of `testbed`, whose collectives are measured first; `base`
    itself without a testbed."""
    if testbed is None:
        return base
    if getattr(backend, "measure", None) is None:
        raise ArgumentError(
            where="testbed", expected="a backend whose ranks use the network", found=backend.name,
            remedy="--against gloo",
        )
    if testbed.hosts != scenario.world_size:
        raise ArgumentError(
            where="testbed", expected=f"{scenario.world_size} hosts, one for each rank",
            found=f"{testbed.hosts}, {testbed.text}",
        )
    return shaped.calibrated(cast(MeasuringBackend, backend), testbed, base=base)

