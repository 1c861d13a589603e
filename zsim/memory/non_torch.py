"""What a rank holds on a CUDA device besides torch's reserved bytes: the CUDA context and NCCL's
buffers; and, inside them, cuBLAS's workspaces. Each is a named figure with its source and a band,
because none has been confirmed on a GPU yet.

NCCL connects the peers of an algorithm when it is first used, so the Program's groups and ops say
which buffers there are; how large they are is in zsim.cluster.collectives.nccl.buffers. It knows no
time and no allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl.buffers import SHARED_NETWORK, Ring, layout
from zsim.cluster.devices import Device, Provenance
from zsim.errors import ZsimError
from zsim.ir.mesh import Mesh
from zsim.ir.program import PHASES, Program, RankProgram

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """One thing that takes device memory: the bytes expected, and the least and most that they may
    be.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bytes of device memory: what is expected, and the least and most that have been seen or are
    possible."""

    nbytes: int
    low: int
    high: int
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the figures depend on: compute capability (90: Hopper), NCCL's channels inside a node
    and for NVLS (0: none), the memory that CUDA reports, which is what the driver leaves, and the
    context."""

    capability: int
    channels: int
    nvls_channels: int
    capacity: Capacity
    context: int
    context_provenance: Provenance = "assumed"
    context_source: str = (
        "pytorch issue 109888: about 400 MB with lazy loading; grows with the kernels that are "
        "used"
    )


def _capacity(
    gib: float, low: float, high: float, source: str, provenance: Provenance = "published"
) -> Capacity:
    return Capacity(
        nbytes=round(gib * GIB), low=round(low * GIB), high=round(high * GIB),
        provenance=provenance, source=source,
    )


_HOPPER = (
    "assumed above Ampere's; NVIDIA nccl issue 1685 has 1.06 GB on H100 for the context and a "
    "communicator"
)
GPUS: dict[str, Gpu] = {
    "A100 SXM 40 GB": Gpu(
        capability=80, channels=24, nvls_channels=0,
        capacity=_capacity(
            39.50, 39.38, 39.60, "torch's out-of-memory message, TianheWu CoSeR issue 10"
        ),
        context=450 * MIB,
    ),
    "A100 SXM 80 GB": Gpu(
        capability=80, channels=24, nvls_channels=0,
        capacity=_capacity(
            79.15, 79.14, 79.35, "total of 81,050 MiB, meta-pytorch torchrec pull request 3580"
        ),
        context=450 * MIB,
    ),
    "H100 SXM 80 GB": Gpu(
        capability=90, channels=24, nvls_channels=16,
        capacity=_capacity(
            79.11, 79.09, 79.25,
            "torch's out-of-memory message, NVIDIA-NeMo Automodel pull request 2673",
        ),
        context=550 * MIB, context_source=_HOPPER,
    ),
    "H100 96 GB HBM2e 500 W": Gpu(
        capability=90, channels=24, nvls_channels=16,
        capacity=_capacity(
            95.0, 94.4, 95.6, "assumed: 96 GiB less what the driver keeps on H100", "assumed"
        ),
        context=550 * MIB, context_source=_HOPPER,
    ),
    "H200 SXM 141 GB": Gpu(
        capability=90, channels=24, nvls_channels=16,
        capacity=_capacity(
            139.83, 139.70, 139.90, "torch's out-of-memory message, pytorch issue 150096"
        ),
        context=550 * MIB, context_source=_HOPPER,
    ),
    "B200 SXM 180 GB": Gpu(
        capability=100, channels=32, nvls_channels=24,
        capacity=_capacity(
            178.3, 177.0, 179.1, "assumed: 183,359 MiB less what the driver keeps on H200",
            "assumed",
        ),
        context=650 * MIB, context_source="assumed above Hopper's",
    ),
    "L40S 48 GB": Gpu(
        capability=89, channels=4, nvls_channels=0,
        capacity=_capacity(
            44.42, 44.40, 44.99, "torch's out-of-memory message, stepfun-ai Step-Video-T2V issue 8"
        ),
        context=426 * MIB, context_provenance="published",
        context_source="nvidia-smi on an RTX 6000 Ada with torch 2.10 and CUDA 13.0, unslothai "
        "unsloth-zoo pull request 1053",
    ),
}
"""By the device's name in the cluster presets. Channels: NCCL's channel search, twice the rings of
its graph."""

CONTEXT_LOW, CONTEXT_HIGH = 300 * MIB, GIB
"""pytorch issue 107667: about 300 MB with lazy loading, more than 1,000 MB with every kernel
loaded."""


def gpu(device: Device) -> Gpu:
    """The figures of `device`; ZsimError for one that is not in `GPUS`."""
    if device.name not in GPUS:
        raise ZsimError(
            where=f'device "{device.name[:60]}"',
            expected=f"one of {', '.join(GPUS)}",
            found="a GPU whose context and channels are not known",
            remedy="add it to zsim.memory.non_torch.GPUS with the sources of its figures",
        )
    return GPUS[device.name]


def cublas_workspace(device: Device) -> int:
    """Bytes that torch takes from its allocator for each cuBLAS handle and stream, which cuBLASLt
    shares."""
    return 32 * MIB if gpu(device).capability // 10 in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB


def outside(program: Program, cluster: ClusterSpec, *, rank: int = 0) -> tuple[Outside, ...]:
    """Everything that `rank` holds besides the buffers of its Program; nothing on a CPU."""
    if cluster.kind != "cuda":
        return ()
    figures = gpu(cluster.device)
    workspace = cublas_workspace(cluster.device)
    context = Outside(
        name="CUDA context",
        nbytes=figures.context,
        low=CONTEXT_LOW,
        high=CONTEXT_HIGH,
        provenance=figures.context_provenance,
        source=figures.context_source,
    )
    cublas = Outside(
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
    found = [
        item
        for name, ops in groups.items()
        for item in _nccl(cluster, program.mesh, name, ops, rank)
    ]
    return (context, cublas, *found)


def communicators(program: RankProgram, mesh: Mesh, *, rank: int) -> dict[str, frozenset[str]]:
    """The groups that `rank` talks in, and the ops it issues there: torch makes a communicator for
    a group's first op.

    Two names for the same ranks are one communicator; a group of one rank has no peer to hold
    buffers for.
    """
    named: dict[str, set[str]] = {}
    for op in (
        op for phase in PHASES for op in (*program.before(phase), *program.phase(phase)) if op.group
    ):
        named.setdefault(op.group, set()).add(op.kind)
    ops: dict[tuple[int, ...], tuple[str, set[str]]] = {}
    for name, kinds in named.items():
        ranks = mesh.group(name, rank)
        if len(ranks) > 1:  # its ends and its size tell an evenly spaced group from all others
            ops.setdefault((ranks[0], ranks[-1], len(ranks)), (name, set()))[1].update(kinds)
    return {name: frozenset(kinds) for name, kinds in ops.values()}


def ring(cluster: ClusterSpec, mesh: Mesh, name: str, *, rank: int) -> Ring:
    """How the communicator of `rank`'s group called `name` is laid out at that rank."""
    figures, links = gpu(cluster.device), cluster.links
    reads = figures.capability == 80 and links.fabric.bandwidth > links.pcie.bandwidth
    return layout(cluster, mesh.group(name, rank), rank, channels=figures.channels, reads=reads)


def total(items: tuple[Outside, ...]) -> Outside:
    """The sum of what lies outside torch's reserved bytes."""
    beyond = [item for item in items if not item.inside_reserved]
    return Outside(
        name="outside torch's reserved bytes",
        nbytes=sum(item.nbytes for item in beyond),
        low=sum(item.low for item in beyond),
        high=sum(item.high for item in beyond),
        provenance="assumed",
        source=", ".join(item.name for item in beyond),
        confirmed=all(item.confirmed for item in beyond),
    )


def room(device: Device, items: tuple[Outside, ...]) -> Capacity:
    """What is left of `device` for torch's allocator: what CUDA reports less `items`, the band from
    the worst of both."""
    all_of_it, taken = gpu(device).capacity, total(items)
    return Capacity(
        nbytes=all_of_it.nbytes - taken.nbytes,
        low=all_of_it.low - taken.high,
        high=all_of_it.high - taken.low,
        provenance="assumed",
        source=f"{all_of_it.source}; less {taken.source}",
    )


def _nccl(
    cluster: ClusterSpec, mesh: Mesh, name: str, ops: frozenset[str], rank: int
) -> list[Outside]:
    figures, seen = gpu(cluster.device), ring(cluster, mesh, name, rank=rank)
    found = [_buffers(f"NCCL ring, {name}", seen.ring_bytes(), _SIZES, low=seen.ring_bytes() // 2)]
    if "all_reduce" in ops:
        nvls = seen.nvls_bytes(figures.nvls_channels)
        trees = seen.tree_bytes() + (0 if nvls else seen.chain_bytes())
        found.append(_buffers(f"NCCL NVLS, {name}", nvls, "NCCL 2.30.7 nvls.cc", low=0))
        found.append(_buffers(f"NCCL trees, {name}", trees, _SIZES, low=0))
    if seen.nodes > 1:
        found.append(
            _buffers(f"NCCL shared network buffers, {name}", 0, _SHARED, low=0, high=SHARED_NETWORK)
        )
    return [item for item in found if item.high]


_SIZES = (
    "NCCL 2.30.7 init.cc, p2p.cc and net.cc; sizes as logged in nccl issue 1685, sums as in nccl "
    "issue 964"
)
_SHARED = (
    "nccl issue 2363 and pull request 2366: only with NCCL_RUNTIME_CONNECT=0, or for send and "
    "receive"
)


def _buffers(name: str, nbytes: int, source: str, *, low: int, high: int | None = None) -> Outside:
    """Channels may be half or twice as many as the search is known to find."""
    return Outside(
        name=name,
        nbytes=nbytes,
        low=low,
        high=2 * nbytes if high is None else high,
        provenance="source code",
        source=source,
    )
