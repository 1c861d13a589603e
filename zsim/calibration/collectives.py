"""Predictions of measured collectives, by NCCL's model on the row's cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.records import Collective, Skipped
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives.nccl.communicator import CurveProvenance
from zsim.cluster.collectives.nccl.constants import TORCH_US
from zsim.cluster.collectives.nccl.curves import Curves
from zsim.cluster.collectives.nccl.estimate import Communicator, estimate
from zsim.cluster.collectives.nccl.measured_curves import curves_of
from zsim.cluster.collectives.nccl.placed import communicator
from zsim.cluster.collectives.nccl.tuner import Algorithm, Protocol
from zsim.cluster.devices import Device, devices, is_called, load_device
from zsim.errors import Caveat, ScenarioError

NETWORK_UNSAID = 0.5
"""Share by which a band is wider where a log of several nodes is put on a cluster's network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Microseconds of a collective, its band, its provenance, and the algorithm and protocol that
    NCCL takes."""

    microseconds: float
    low: float
    high: float
    provenance: CurveProvenance
    algorithm: Algorithm
    protocol: Protocol


def group_of(row: Collective) -> Communicator:
    """NCCL's view of all ranks of the row's cluster."""
    ranks = tuple(range(row.cluster.num_ranks))
    return replace(
        communicator(row.cluster, row.cluster.path(ranks)), nvls=row.nvls, algorithm=row.algorithm
    )


def predict(
    row: Collective, *, curves: Curves | None = None, group: Communicator | None = None
) -> Prediction:
    """The time of `row`, which does not see what was measured; ZsimError without a model."""
    known = curves_of(row.cluster) if curves is None else curves
    alone = estimate(row.op, row.nbytes, group or group_of(row), known)
    torch_us = TORCH_US if row.through_torch else 0.0
    microseconds, wider = alone.microseconds + torch_us, 1 + row.widened
    least, most = row.network
    return Prediction(
        microseconds=microseconds,
        low=min((alone.low + torch_us) / wider, microseconds * least),
        high=max((alone.high + torch_us) * wider, microseconds * most),
        provenance="assumed" if row.widened else alone.provenance,
        algorithm=alone.algorithm,
        protocol=alone.protocol,
    )


def of_log(row: LogRow, *, cluster: str = "") -> Collective | Skipped:
    """A row of nccl-tests on the preset `cluster`, or on the node that its GPU is sold in."""
    name = cluster or node_of(row.gpu)
    if not name:
        remedy = "--cluster names one of `zsim list clusters`"
        return _skipped(row, f"no preset has the GPU {row.gpu[:40]!r}; {remedy}")
    caveats = list(row.caveats)
    if not cluster:
        caveats.append(
            Caveat(
                f"ran on {name}, for the log names no cluster: --cluster says another",
                widens=NETWORK_UNSAID if row.num_nodes > 1 else 0.0,
            )
        )
    try:
        made = _of_ranks(load_cluster(name, nodes=row.num_nodes), row)
    except ScenarioError as error:
        return _skipped(row, f"{row.num_ranks} ranks on {row.num_nodes} nodes: {error}")
    if not is_called(made.device.name, row.gpu):
        return _skipped(row, f"ran on {row.gpu[:40]}, and {name} has {made.device.name}")
    return Collective(
        source=row.source, line=row.line, caveats=tuple(caveats), op=row.op, nbytes=row.nbytes,
        seconds=row.microseconds / 1e6, cluster=made, nvls=row.nvls,
    )


def _of_ranks(cluster: ClusterSpec, row: LogRow) -> ClusterSpec:
    """`cluster` with as many ranks on each node as `row` has; ScenarioError for more than fit."""
    per_node = row.num_ranks // row.num_nodes
    if not 1 <= per_node <= cluster.devices_per_node:
        raise ScenarioError((f"expected 1 to {cluster.devices_per_node} ranks on a node of "
                             f"{cluster.name}, found {per_node}",))
    nics = max(1, cluster.nics_per_node * per_node // cluster.devices_per_node)
    return replace(
        cluster, num_ranks=row.num_ranks, devices_per_node=per_node, nics_per_node=nics
    )


def node_of(gpu: str) -> str:
    """The cluster preset of the device preset that torch calls `gpu`; "" for none."""
    for name in devices():
        device: Device = load_device(name)
        if device.node in clusters() and is_called(device.name, gpu):
            return device.node
    return ""


def _skipped(row: LogRow, reason: str) -> Skipped:
    return Skipped(source=row.source, line=row.line, reason=reason)
