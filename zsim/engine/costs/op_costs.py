"""Durations of ops on a cluster: of kernels by `zsim.engine.costs.kernel_time`, of collectives by
`zsim.cluster.collectives`, of their issue by constants.

`Costs` computes the duration of one op at a time and caches it, since most ops of a step recur.
Streams and strategies play no part. Every constant comes from the cluster's preset, with its
provenance.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, log2

from zsim.cluster.cluster import ClusterSpec, Layout, Path
from zsim.cluster.collectives import LIBRARIES
from zsim.cluster.devices import Device
from zsim.engine.costs import host_work, issue_times, kernel_time
from zsim.engine.costs.driver_time import driver_ns
from zsim.engine.costs.interference import (
    DeviceShare,
    KernelLoss,
    device_share,
    lost_share,
    remaining,
)
from zsim.engine.costs.issue_times import Launched
from zsim.engine.execution import EAGER, Execution
from zsim.engine.faults.fault import LostLink
from zsim.engine.timeline import NEVER
from zsim.ir.ops import (
    ACCUMULATE,
    CAST_LOGITS,
    CAST_SCORES,
    CLONE,
    MASK_SCORES,
    MOVE_GRADIENT,
    SCALE_SCORES,
    SOFTMAX_PRODUCT,
    Kernel,
    Op,
)
from zsim.ir.order.launch_queue import SYNCHRONOUS
from zsim.ir.order.waits import named_ranks

MOST_CLUSTERS, MOST_ANSWERS = 8, 50_000
"""Clusters, in so many executions, whose answers are kept, and the most answers of each."""

UNKNOWN_CHANNELS = 24
"""Channels of a collective of a library other than NCCL: those of NCCL's ring on an H100.
Assumed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """The part of the device that a collective leaves, and the share that each kernel loses there,
    once it is known."""

    rest: Device
    losses: dict[Kernel, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Answers on one `cluster`: times of kernels and collectives, and shares that these take."""

    cluster: ClusterSpec
    kernels: dict[Kernel, int] = field(default_factory=dict)
    collectives: dict[tuple[str, int, Layout], int] = field(default_factory=dict)
    shares: dict[tuple[str, int, Layout], DeviceShare] = field(default_factory=dict)
    beside: dict[DeviceShare, _Beside] = field(default_factory=dict)
    paths: dict[Layout, Path] = field(default_factory=dict)


_LATEST: dict[tuple[int, Execution], _Answers] = {}


def _answers(cluster: ClusterSpec, execution: Execution) -> _Answers:
    """The answers so far, shared by all who ask of that very object: a sweep's rows do."""
    key = id(cluster), execution
    known = _LATEST.pop(key, None)
    if known is None or len(known.kernels) + len(known.collectives) > MOST_ANSWERS:
        known = _Answers(cluster)
    _LATEST[key] = known
    if len(_LATEST) > MOST_CLUSTERS:
        del _LATEST[next(iter(_LATEST))]
    return known


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """The costs of ops on `cluster`, all in int nanoseconds."""

    cluster: ClusterSpec
    execution: Execution = EAGER
    _kernels: dict[int, tuple[tuple[Kernel, ...], int]] = field(default_factory=dict, repr=False)
    _launches: dict[int, tuple[tuple[Kernel, ...], Launched]] = field(
        default_factory=dict, repr=False
    )
    _layouts: dict[int, tuple[tuple[int, ...], Layout]] = field(default_factory=dict, repr=False)
    _kernel_losses: dict[
        tuple[int, str, int, Layout], tuple[tuple[Kernel, ...], KernelLoss]
    ] = field(default_factory=dict, repr=False)
    _known: _Answers = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", _answers(self.cluster, self.execution))

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """The time of `kernels` in sequence on the device; 0 for none.

        Cached by identity, together with the tuple, so that no other tuple gets its id.
        """
        known = self._kernels.get(id(kernels))
        if known is None:
            known = self._kernels[id(kernels)] = (kernels, sum(map(self.kernel_ns, kernels)))
        return known[1]

    def kernel_ns(self, kernel: Kernel) -> int:
        """The time of one kernel; 0 for one that another kernel's work includes.

        `kernel_time` has the time on the device, `host_work` that of copies over PCIe and of work
        on the host, which has the node to itself. Rounded up once, at least
        1. Cached: a model's blocks have equal kernels.
        """
        known = self._known.kernels.get(kernel)
        if known is None:
            known = self._known.kernels[kernel] = (
                0 if self._is_fused(kernel) else self._kernel_ns(kernel)
            )
        return known

    def _is_fused(self, kernel: Kernel) -> bool:
        """True where another kernel does this one's work, or none has to.

        Gradients that lie in the buffer which is reduced are not moved. A compiled kernel writes
        heads in the order that the next wants.
        """
        accumulation = self.execution.accumulation
        if kernel.operator == CLONE:
            return bool(self.execution.compile)
        if kernel.operator in (SCALE_SCORES, MASK_SCORES, CAST_SCORES, SOFTMAX_PRODUCT):
            return bool(self.execution.compile) or self.execution.softmax == "fused"
        if kernel.operator in (CAST_LOGITS, "nll_loss"):
            return self.execution.compiles_loss
        return (kernel.operator == ACCUMULATE and accumulation == "fused") or (
            kernel.operator == MOVE_GRADIENT and accumulation != "eager"
        )

    def _kernel_ns(self, kernel: Kernel) -> int:
        if kernel.location != "device":
            return host_work.alone_ns(kernel, self.cluster, self.execution)
        alone = kernel_time.kernel_ns(kernel, self.cluster.device, self.execution)
        return ceil(alone * self._slowest) if self._slowest > 1 else alone

    def kernel_loss(
        self, kernels: tuple[Kernel, ...], kind: str, nbytes: int, ranks: tuple[int, ...]
    ) -> KernelLoss:
        """The share of their time beside a collective that `kernels` lose; 0 where the scenario
        switches interference off."""
        device = self.cluster.device
        if self.cluster.kind == "cpu":  # threads of the collective take cores that ranks compute on
            taken = device.interference if self.execution.interference else 0.0
            return KernelLoss(taken, 0.0)
        if not (self.execution.interference and device.interference) or len(ranks) == 1:
            return KernelLoss(0.0, 0.0)
        layout = self._layout(ranks)
        key = id(kernels), kind, nbytes, layout
        known = self._kernel_losses.get(key)
        if known is None:
            share = self._known.shares.get((kind, nbytes, layout))
            if share is None:
                share = self._device_share(kind, nbytes, ranks)
                self._known.shares[kind, nbytes, layout] = share
            loss = KernelLoss(
                self._lost_by_all(kernels, share),
                self._lost_by_all(kernels, DeviceShare(share.multiprocessors, 0.0)),
            )
            known = self._kernel_losses[key] = kernels, loss  # as compute_ns remembers
        return known[1]

    def _lost_by_all(self, kernels: tuple[Kernel, ...], share: DeviceShare) -> float:
        """The share of their time that `kernels`, in sequence, lose to a collective that takes
        `share` of the device."""
        device, total = self.cluster.device, self.compute_ns(kernels)
        beside = self._known.beside.get(share)
        if beside is None:
            beside = self._known.beside[share] = _Beside(remaining(device, share))
        lost = sum(self.kernel_ns(kernel) * self._lost_share(kernel, beside) for kernel in kernels)
        return device.interference * lost / total if total else 0.0

    def _lost_share(self, kernel: Kernel, beside: _Beside) -> float:
        known = beside.losses.get(kernel)
        if known is None:
            known = beside.losses[kernel] = lost_share(
                kernel, self.cluster.device, self.execution, beside.rest
            )
        return known

    def _device_share(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> DeviceShare:
        """The share of the device that a collective takes."""
        cluster, path = self.cluster, self.path(ranks)
        known = LIBRARIES[cluster.collectives].channels(kind, nbytes, cluster=cluster, path=path)
        channels, switch = known or (UNKNOWN_CHANNELS, False)
        ns = self.collective_ns(kind, nbytes, ranks)
        return device_share(
            kind, nbytes, ranks=len(ranks), ns=ns, channels=channels, in_the_switch=switch,
            device=cluster.device,
        )

    @property
    def collective_interference(self) -> float:
        """The share of its time beside kernels that a collective loses; 0 where the scenario
        switches interference off."""
        return self.cluster.device.collective_interference if self.execution.interference else 0.0

    @property
    def launch_queue(self) -> int:
        """Most kernels by which the host may be ahead of the device; 0 for any number, SYNCHRONOUS
        for none."""
        return SYNCHRONOUS if self.execution.synchronous else self.cluster.device.launch_queue

    @property
    def node_size(self) -> int:
        """Ranks of a full node, which share its host."""
        return self.cluster.devices_per_node

    @property
    def _slowest(self) -> float:
        """The slowest rank's time over the expected one, at least 1; it grows with the nodes.

        Every collective waits for that rank.
        """
        return 1 + self.cluster.device.straggler * log2(self.cluster.num_nodes)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """The time of a collective of `nbytes` (the full message) over `ranks`, alone on its links;
        0 for one rank, NEVER over a lost link."""
        size = len(ranks)
        if size == 1:
            return 0
        layout = self._layout(ranks)
        key = (kind, nbytes, layout)
        known = self._known.collectives.get(key)
        if known is None:
            known = self._known.collectives[key] = (
                NEVER if self.cluster.cut_by(ranks) else self._wire_ns(kind, nbytes, layout, ranks)
            )
        return known

    def lost_links(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """The faults by which a collective over `ranks` never ends, with the ranks of each NIC."""
        return tuple(
            f"{LostLink(node=node, nic=nic)} (of "
            f"{named_ranks(sorted(self.cluster.ranks_at(node, nic)))})"
            for node, nic in self.cluster.cut_by(ranks)
        )

    def _wire_ns(self, kind: str, nbytes: int, layout: Layout, ranks: tuple[int, ...]) -> int:
        algorithms = LIBRARIES[self.cluster.collectives]
        path = self._path(layout, ranks)
        wire = algorithms.placed_ns(kind, nbytes, cluster=self.cluster, path=path)
        return self.cluster.overheads.collective + wire

    def _layout(self, ranks: tuple[int, ...]) -> Layout:
        """The layout of `ranks`, cached by identity: a mesh has one tuple for all members of a
        group."""
        known = self._layouts.get(id(ranks))
        if known is None:
            known = self._layouts[id(ranks)] = (ranks, self.cluster.layout(ranks))
        return known[1]

    def path(self, ranks: tuple[int, ...]) -> Path:
        """The cluster's path of a ring over `ranks`, found once for each layout."""
        return self._path(self._layout(ranks), ranks)

    def _path(self, layout: Layout, ranks: tuple[int, ...]) -> Path:
        if layout not in self._known.paths:
            self._known.paths[layout] = self.cluster.path(ranks)
        return self._known.paths[layout]

    def algorithm(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> str:
        """The name of the algorithm behind `collective_ns` over several ranks; "ring" for a ring.
        """
        path = self.path(ranks)
        library = LIBRARIES[self.cluster.collectives]
        return library.algorithm(kind, nbytes, cluster=self.cluster, path=path)

    def usage(self, ranks: tuple[int, ...]) -> dict[int, dict[str, Fraction]]:
        """The share of each link that a collective over `ranks` takes at full speed, by rank and
        kind of link."""
        return self.cluster.usage(ranks)

    def host_usage(
        self, kernels: tuple[Kernel, ...], rank: int, *, in_step: bool
    ) -> dict[Hashable, Fraction]:
        """The shares of the rank's node that an op off the device takes at full speed, by resource.

        With ranks `in_step`, those of all ranks of the node.
        """
        times = {kernel: self.kernel_ns(kernel) for kernel in kernels}
        return host_work.usage(
            kernels, times, rank, self.cluster, in_step=in_step, execution=self.execution
        )

    def bytes_sent(
        self, kind: str, nbytes: int, *, group_size: int, rank: int = 0, root: int = 0
    ) -> int:
        """Bytes that group-local `rank` puts on the wire in a collective of `nbytes`."""
        algorithms = LIBRARIES[self.cluster.collectives]
        return algorithms.bytes_sent(kind, nbytes, group_size=group_size, rank=rank, root=root)

    def issue_ns(self, op: Op) -> int:
        """The host's time to issue `op`: per collective, with the hook that issues it, or per
        kernel. Events of memory alone cost nothing, unless the driver is called for them."""
        calls, launched = op.driver_calls, self._launched(op.kernels)
        issued = issue_times.issue_ns(op, launched, self.cluster, self.execution)
        return issued + (0 if calls is None else driver_ns(calls))

    def wake_ns(self, ops: tuple[Op, ...]) -> dict[int, int]:
        """Waits of a rank's collectives for a core, by op. They are in proportion to the compute
        since the collective before, beyond `SOON_NS`, and at most the cluster's `wake`."""
        return issue_times.wake_ns(
            ops, longest=self.cluster.overheads.wake,
            computed_ns=lambda op: self.compute_ns(op.kernels) + self.issue_ns(op),
        )

    def _launched(self, kernels: tuple[Kernel, ...]) -> Launched:
        """The launches by the host for an op's `kernels`, cached as `compute_ns` is."""
        known = self._launches.get(id(kernels))
        if known is None:
            own = [kernel for kernel in kernels if not self._is_fused(kernel)]
            known = self._launches[id(kernels)] = kernels, Launched.of(own, self.execution)
        return known[1]
