"""Links of a cluster, and what NCCL and the host need of its nodes besides.

The bandwidths of links are what NCCL reaches on them, never data-sheet NVLink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.cluster.devices import Provenance

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Fabric = Literal["ib", "roce", "efa", "tcp", "unknown"]
Processor = Literal["intel", "amd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An edge: bytes/s in each direction, and nanoseconds of latency."""

    bandwidth: int
    latency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The kinds of edge. A `fabric` link joins a device and its node's switch, `pcie` a device or
    NIC and its PCIe switch. A `host` link joins a PCIe switch and host memory, `rail` a NIC and its
    rail switch.

    Where devices have no link but PCI Express, `fabric` is that link. A ring in the node and the
    way to a NIC share it.
    """

    fabric: Link
    pcie: Link
    host: Link
    rail: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Nanoseconds to start a collective. Nanoseconds of the host to issue a kernel or a collective,
    and to run a hook of FSDP. Those to dispatch a DTensor that the optimizer steps on a CPU.

    An operator of an eager model takes `issue_operator`: its module's Python, autograd, and the
    calls that it is made of. It is 0 where it takes as long as a kernel.

    Where ranks compute on the cores that collectives need too, a collective waits up to `wake` for
    the operating system to run its threads (`zsim.engine.costs.issue_times.TICK_NS`).
    """

    collective: int
    issue_kernel: int
    issue_collective: int
    issue_hook: int
    issue_operator: int = 0
    step_dtensor: int = 0
    wake: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nccl:
    """Properties of a node that NCCL's model needs besides its links: GPU generation, kind of
    network, processors' maker, and links between its GPUs."""

    generation: Generation
    fabric: Fabric
    processor: Processor
    links: Literal["nvlink", "pcie"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCurve:
    """The measured time of collectives on this cluster, in place of the generation's curve.

    The `scope` is rings inside a node, the switch's all-reduce, or the network. The time is t =
    floor + wire/share + Σ added·B/(B + half), with half in bytes. Inside a node floor and added are
    in microseconds, on a network in multiples of the tuner's latencies. Nine of ten measurements
    are expected within the share `band` of it for messages from 64 MiB on. That share is
    `band_middle` from 1 MiB on, and `band_small` below.
    """

    scope: Literal["ring", "nvls", "network"]
    collective: str
    floor: float
    share: float
    added: tuple[tuple[float, int], ...]
    band: float
    band_middle: float
    band_small: float
    provenance: Provenance
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRail:
    """One NIC's link that carries only `bandwidth` bytes/s."""

    node: int
    nic: int
    bandwidth: int
