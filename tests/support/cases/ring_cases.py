"""Random collectives at once on random clusters, as flows and as steps, and why the two differ.

A case has one or two collectives over each axis of a mesh, and perhaps trouble. A late rank comes
later once, a slow one to each collective, and a slow link carries less.
Reasons are found by experiment: a difference is laid to latency, say, where it is gone in the same
case without latencies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from tests.support.programs.collectives_at_once import (
    alike,
    as_flows,
    as_steps,
    bandwidth_alone,
    op,
)
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.links import SlowRail
from zsim.engine.costs.op_costs import Costs
from zsim.engine.ring_steps import links
from zsim.engine.ring_steps.links import SLICE_NBYTES
from zsim.engine.ring_steps.work import closed_forms
from zsim.engine.timeline import Delays
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program

PRESETS = ("dgx-h100", "a100-80-roce", "p4d", "a100-80-4hdr", "pcie-box", "cpu-gloo")
SHAPES = (
    (1, 8),
    (1, 16),
    (2, 2),
    (2, 4),
    (4, 2),
    (2, 3),
    (3, 2),
    (2, 8),
    (8, 2),
    (4, 4),
    (2, 12),
    (3, 8),
    (2, 16),
    (4, 8),
    (8, 4),
    (2, 6),
    (5, 3),
    (2, 32),
)
TROUBLES = ("none", "none", "a late rank", "a slow rank", "a slow link")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
NEAR = 0.001
"""Share of a time by which two are told to be equal, for reasons."""

REASONS = {
    "equal": "the same nanosecond",
    "shorter: a rank goes on by itself": (
        "no flow shares a link; chunks move before a late rank comes, and a rank whose own part is "
        "over goes on to the next collective, where a flow begins and ends for all at once"
    ),
    "shorter: no ring": (
        "a tree or NVLS has its time alone beside rings, where flows share links with it"
    ),
    "shorter: latency is not stretched": (
        "gone without latencies; a flow that shares a link has its latency stretched too, where "
        "a ring in its latency leaves links to others"
    ),
    "shorter: a chain fills and drains": (
        "there without latencies, with a broadcast; a flow takes its share of every member's links "
        "from start to end, where the chain's ends are idle first or last"
    ),
    "shorter: wide hops are idle between chunks": (
        "there without latencies or broadcasts; a flow takes its share of fabric and NIC at every "
        "member, where a rank sends to the next over one of the two"
    ),
    "longer: turns": (
        "gone with slices of a 64th; a chunk waits for a whole slice of another ring, and its "
        "ring's other hops wait with it"
    ),
    "longer: one queue for a NIC": (
        "there with fine slices, where ranks share NICs; a ring beside two others has a third of a "
        "NIC, where a flow has half of its own ranks' part"
    ),
    "longer: rings wait for one another": (
        "there with fine slices, where each rank has its NICs; a ring waits on one link after "
        "another, and leaves others idle meanwhile"
    ),
}
"""Reasons for a difference of steps from flows, each with what shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCase:
    """Collectives at once, and what is wrong with a rank or a link."""

    cluster: ClusterSpec
    program: Program
    delays: tuple[Delays, ...]
    trouble: str

    def __str__(self) -> str:
        ops = ", ".join(f"{each.kind} {each.nbytes:,} B" for each in self.program.ranks[0].steady)
        spec = self.cluster
        return f"{spec.name} ({spec.collectives}), {self.program.mesh}: {ops}; {self.trouble}"


def drawn(seed: int) -> RingCase:
    """The case of that number."""
    draw = random.Random(seed)
    preset, (replicate, shard) = draw.choice(PRESETS), draw.choice(SHAPES)
    mesh = Mesh(dp_replicate=replicate, dp_shard=shard)
    size = mesh.world_size
    nodes = draw.choice([1, 2, 4]) if preset == "cpu-gloo" else -(-size // 8)
    cluster = load_cluster(preset, nodes=nodes, ranks=size)
    if draw.random() < 0.4:
        cluster = replace(cluster, collectives="ring")
    trouble = draw.choice(TROUBLES)
    late, delays = None, (Delays(),)
    if trouble == "a late rank":
        late = draw.randrange(size)
        delays = (Delays(), Delays(start=int(10 ** draw.uniform(3, 7))))
    elif trouble == "a slow rank":
        late, later = draw.randrange(size), int(10 ** draw.uniform(3, 6))
        delays = (Delays(), Delays(start=later, later=dict.fromkeys(range(4), later)))
    elif trouble == "a slow link":
        rail = SlowRail(
            node=draw.randrange(cluster.num_nodes),
            nic=draw.randrange(cluster.nics_per_node),
            bandwidth=int(cluster.links.rail.bandwidth * draw.choice([0.1, 0.3, 0.5, 0.8])),
        )
        cluster = replace(cluster, slow_rails=(rail,))
    slower = 20 if preset == "cpu-gloo" else 1
    ops = [
        op(
            draw.choice(KINDS),  # type: ignore[arg-type]
            int(10 ** draw.uniform(3, 8.3)) // slower + 1,
            group=group,
            index=index,
        )
        for index, group in enumerate(["dp_shard", "dp_replicate"] * draw.choice([1, 1, 2]))
    ]
    return RingCase(
        cluster=cluster, program=alike(mesh, *ops, late=late), delays=delays, trouble=trouble
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """Nanoseconds until all is over, of flows and of steps, each also where no links are shared."""

    flows: int
    flows_alone: int
    steps: int
    steps_alone: int

    @property
    def ratio(self) -> float:
        """Steps over flows."""
        return self.steps / self.flows


def compared(
    case: RingCase, cluster: ClusterSpec | None = None, *, slice_nbytes: int = SLICE_NBYTES
) -> Compared:
    """The case in both details, perhaps on another cluster, or with other slices."""
    costs = Costs(cluster or case.cluster)
    with patch.object(links, "SLICE_NBYTES", slice_nbytes):
        times = [
            run(case.program, costs, case.delays, contention=contention).step_time_ns
            for run in (as_flows, as_steps)
            for contention in (True, False)
        ]
    return Compared(*times)


def breaches(case: RingCase, times: Compared) -> Sequence[str]:
    """Laws that a case breaks."""
    costs = Costs(case.cluster)
    in_turn = max(
        delays.start
        + sum(delays.later.values())
        + sum(
            costs.collective_ns(each.kind, each.nbytes, case.program.mesh.group(each.group, rank))
            + costs.issue_ns(each)
            for each in case.program.ranks[0].steady
        )
        for delays in case.delays
        for rank in range(case.program.mesh.world_size)
    )
    laws = {
        "sharing links makes nothing shorter": times.steps >= times.steps_alone,
        "without shared links steps take no longer than flows": times.steps_alone
        <= times.flows_alone,
        "one collective of each group, without shared links and trouble, is as long in both": (
            case.trouble != "none"
            or len(case.program.ranks[0].steady) > 2
            or times.steps_alone == times.flows_alone
        ),
        "sharing links is no worse than taking turns": times.steps <= in_turn,
    }
    return [f"{case}: not {law}: {times}" for law, holds in laws.items() if not holds]


def reason(case: RingCase, times: Compared) -> str:
    """The reason for the difference of steps from flows, one of REASONS."""
    if times.steps == times.flows:
        return "equal"
    bare = bandwidth_alone(case.cluster)
    if times.steps > times.flows:
        fine = compared(case, slice_nbytes=SLICE_NBYTES // 64)
        if fine.steps <= fine.flows * (1 + NEAR):
            return "longer: turns"
        own_nics = case.cluster.nics_per_node >= case.cluster.devices_per_node
        return "longer: rings wait for one another" if own_nics else "longer: one queue for a NIC"
    if times.flows == times.flows_alone:
        return "shorter: a rank goes on by itself"
    if closed_forms(case.program, Costs(case.cluster)):
        return "shorter: no ring"
    quick = compared(case, bare)
    if quick.steps >= quick.flows * (1 - NEAR):
        return "shorter: latency is not stretched"
    if any(each.kind == "broadcast" for each in case.program.ranks[0].steady):
        return "shorter: a chain fills and drains"
    return "shorter: wide hops are idle between chunks"
