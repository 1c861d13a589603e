"""Non-torch memory of a rank's CUDA device: the CUDA context and NCCL's buffers; besides, cuBLAS's
workspaces inside torch's reserved bytes. Each is a named figure with its source and a band, because
none has been confirmed on a GPU yet.

NCCL connects the peers of an algorithm at its first use, so the buffers follow from the Program's
groups and ops. Their sizes are in zsim.cluster.collectives.nccl.buffers. This module knows no time
and no allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl.buffers import SHARED_NETWORK, Ring, layout
from zsim.cluster.devices import (
    Device,
    Provenance,
    Runtime,
    devices,
    figures_of,
    load_device,
    values,
)
from zsim.io.units import format_bytes
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program, RankProgram

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class NonTorchMemory:
    """Bytes of device memory with one use, such as the CUDA context: expected, least and most.

    `inside_reserved`: torch's allocator hands it out, so reserved bytes contain it already.
    `confirmed`: measured on a GPU by this project.
    """

    name: str
    nbytes: int
    low: int
    high: int
    provenance: Provenance
    source: str
    inside_reserved: bool = False
    confirmed: bool = False


class Capacity(NamedTuple):
    """Bytes of device memory: what is expected, and the least and most that have been seen or are
    possible."""

    nbytes: int
    low: int
    high: int
    provenance: Provenance
    source: str


CONTEXT_LOW, CONTEXT_HIGH = 300 * MIB, GIB
"""pytorch issue 107667: about 300 MB with lazy loading, more than 1,000 MB with every kernel
loaded."""


def runtime(device: Device) -> Runtime:
    """Figures of CUDA and NCCL for `device`, or for the preset of its name. An unknown GPU has
    those of GPUs in general, in a wide band."""
    return _with_runtime(device).runtime or _assumed(device.memory)


ASSUMED = "assumed: the GPU is unknown, and its file has no table [runtime]"


def _assumed(memory: int) -> Runtime:
    """Figures for an unknown GPU. Presets report 92 to 100 % of their memory, or 7 % more, where
    vendors write GB for GiB."""
    texts = {
        "capability": "80", "channels": "24", "nvls_channels": "0",
        "capacity": f"{98 * memory // 100} B", "least_capacity": f"{92 * memory // 100} B",
        "most_capacity": f"{107 * memory // 100} B", "context": "500 MiB",
    }
    table = {
        key: {"value": text, "provenance": "assumed", "source": ASSUMED}
        for key, text in texts.items()
    }
    return Runtime(**values(table), figures=tuple(figures_of("", table)))


def _with_runtime(device: Device) -> Device:
    """`device` where it has figures of its own, else the preset of its name, if there is one."""
    if device.runtime:
        return device
    presets = (load_device(name) for name in devices())
    return next((each for each in presets if each.name == device.name), device)


def capacity(device: Device) -> Capacity:
    """Bytes of device memory that CUDA reports, which is what the driver leaves.

    A device without figures of its own has as much of its memory as the preset of its name.
    """
    reported, known = runtime(device), _with_runtime(device)
    figure, share = reported.figure("capacity"), Fraction(device.memory, known.memory)
    nbytes, low, high = (
        round(each * share)
        for each in (reported.capacity, reported.least_capacity, reported.most_capacity)
    )
    if share == 1:
        return Capacity(
            nbytes=nbytes, low=low, high=high, provenance=figure.provenance, source=figure.source
        )
    source = f"the same share of its memory as of {format_bytes(known.memory)}: {figure.source}"
    return Capacity(nbytes=nbytes, low=low, high=high, provenance="assumed", source=source)


def cublas_workspace(device: Device) -> int:
    """Bytes that torch takes from its allocator for each cuBLAS handle and stream, which cuBLASLt
    shares."""
    is_large = runtime(device).capability // 10 in (9, 10, 12)
    return 32 * MIB if is_large else (2 * 4096 + 8 * 16) * KIB


def outside(program: Program, cluster: ClusterSpec, *, rank: int = 0) -> tuple[NonTorchMemory, ...]:
    """Everything that `rank` holds besides the buffers of its Program; nothing on a CPU."""
    if cluster.kind != "cuda":
        return ()
    context_figure = runtime(cluster.device).figure("context")
    workspace = cublas_workspace(cluster.device)
    context = NonTorchMemory(
        name="CUDA context",
        nbytes=runtime(cluster.device).context,
        low=CONTEXT_LOW,
        high=CONTEXT_HIGH,
        provenance=context_figure.provenance,
        source=context_figure.source,
    )
    cublas = NonTorchMemory(
        name="cuBLAS workspaces",
        nbytes=2 * workspace,
        low=workspace,
        high=2 * (workspace + MIB),
        provenance="source code",
        source="torch CublasHandlePool.cpp: one per handle and stream; forward and autograd's "
               "thread have a handle each",
        inside_reserved=True,
    )
    groups = communicators(program.of_rank(rank), program.mesh, rank=rank)
    buffers = [
        item
        for name, ops in groups.items()
        for item in _nccl(cluster, program.mesh, name, ops, rank)
    ]
    return (context, cublas, *buffers)


def communicators(program: RankProgram, mesh: Mesh, *, rank: int) -> dict[str, frozenset[str]]:
    """The groups that `rank` talks in, and the ops it issues there: torch makes a communicator for
    a group's first op.

    Two names for the same ranks are one communicator; a group of one rank has no peer to hold
    buffers for.
    """
    ops: dict[tuple[int, ...], tuple[str, set[str]]] = {}
    for name, kinds in program.collectives.items():
        ranks = mesh.group(name, rank)
        if len(ranks) > 1:  # its ends and its size tell an evenly spaced group from all others
            ops.setdefault((ranks[0], ranks[-1], len(ranks)), (name, set()))[1].update(kinds)
    return {name: frozenset(kinds) for name, kinds in ops.values()}


def ring(cluster: ClusterSpec, mesh: Mesh, name: str, *, rank: int) -> Ring:
    """Layout of the ring of `rank`'s group called `name` at that rank."""
    gpu, links = runtime(cluster.device), cluster.links
    reads = gpu.capability == 80 and links.fabric.bandwidth > links.pcie.bandwidth
    return layout(cluster, mesh.group(name, rank), rank, channels=gpu.channels, reads=reads)


def total(items: tuple[NonTorchMemory, ...]) -> NonTorchMemory:
    """The sum of what lies outside torch's reserved bytes."""
    beyond = [item for item in items if not item.inside_reserved]
    return NonTorchMemory(
        name="outside torch's reserved bytes",
        nbytes=sum(item.nbytes for item in beyond),
        low=sum(item.low for item in beyond),
        high=sum(item.high for item in beyond),
        provenance="assumed",
        source=", ".join(item.name for item in beyond),
        confirmed=all(item.confirmed for item in beyond),
    )


def _nccl(
    cluster: ClusterSpec, mesh: Mesh, name: str, ops: frozenset[str], rank: int
) -> list[NonTorchMemory]:
    gpu, layout = runtime(cluster.device), ring(cluster, mesh, name, rank=rank)
    nbytes = layout.ring_bytes()
    buffers = [_buffers(f"NCCL ring, {name}", nbytes, _SIZES, low=nbytes // 2)]
    if "all_reduce" in ops:
        nvls = layout.nvls_bytes(gpu.nvls_channels)
        trees = layout.tree_bytes() + (0 if nvls else layout.chain_bytes())
        buffers.append(_buffers(f"NCCL NVLS, {name}", nvls, "NCCL 2.30.7 nvls.cc", low=0))
        buffers.append(_buffers(f"NCCL trees, {name}", trees, _SIZES, low=0))
    if layout.nodes > 1:
        buffers.append(
            _buffers(f"NCCL shared network buffers, {name}", 0, _SHARED, low=0, high=SHARED_NETWORK)
        )
    return [item for item in buffers if item.high]


_SIZES = (
    "NCCL 2.30.7 init.cc, p2p.cc and net.cc; sizes as logged in nccl issue 1685, sums as in nccl "
    "issue 964"
)
_SHARED = (
    "nccl issue 2363 and pull request 2366: only with NCCL_RUNTIME_CONNECT=0, or for send and "
    "receive"
)


def _buffers(
    name: str, nbytes: int, source: str, *, low: int, high: int | None = None
) -> NonTorchMemory:
    """Channels may be half or twice as many as the search is known to find."""
    return NonTorchMemory(
        name=name,
        nbytes=nbytes,
        low=low,
        high=2 * nbytes if high is None else high,
        provenance="source code",
        source=source,
    )
