"""Rings whose hops a person can follow: a byte takes a nanosecond, a hop 2 ns of latency, and a
launch 5."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.programs.collectives_at_once import alike, as_flows, as_steps, op
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.links import Link, SlowRail
from zsim.engine.costs.op_costs import Costs
from zsim.engine.ring_steps import links
from zsim.engine.timeline import Delays, Timeline
from zsim.ir.mesh import Mesh

FOUR, SQUARE = Mesh(dp_shard=4), Mesh(dp_replicate=2, dp_shard=2)
Row = tuple[int, int, int, int]
"""Step, source, start and end."""


def cluster(*, nodes: int = 1, ranks: int = 4) -> ClusterSpec:
    """Hosts of one NIC each; the network is as fast as a host inside."""
    spec = load_cluster("cpu-gloo", nodes=nodes, ranks=ranks)
    near, far = Link(bandwidth=10**9, latency=1), Link(bandwidth=10**9, latency=2)
    return replace(
        spec,
        collectives="ring",
        overheads=replace(spec.overheads, collective=5, issue_collective=0),
        links=replace(spec.links, fabric=near, pcie=replace(near, latency=0), rail=replace(far)),
    )


def rows(timeline: Timeline, *, source: int | None = None, group: str = "dp_shard") -> list[Row]:
    return [
        (hop.step, hop.source, hop.start_ns, hop.end_ns)
        for hop in sorted(timeline.hops, key=lambda hop: (hop.step, hop.source))
        if hop.group == group and source in (None, hop.source)
    ]


def test_each_rank_sends_a_chunk_in_each_step():
    steps = as_steps(alike(FOUR, op("all_gather", 400)), Costs(cluster()))
    assert rows(steps) == [
        (step, rank, 5 + 102 * step, 107 + 102 * step) for step in range(3) for rank in range(4)
    ]
    assert steps.step_time_ns == 311


def test_slices_of_a_broadcast_follow_one_another_down_the_chain(monkeypatch):
    monkeypatch.setattr("zsim.cluster.collectives.ring.BROADCAST_SLICE_NBYTES", 100)
    steps = as_steps(alike(FOUR, op("broadcast", 250, root=2)), Costs(cluster()))
    assert rows(steps, source=2) == [(0, 2, 5, 91), (1, 2, 91, 177), (2, 2, 177, 263)]
    assert rows(steps, source=1) == []
    assert [steps.ranks[rank].ends[0] for rank in (2, 3, 0, 1)] == [263, 349, 433, 433]


def test_a_late_rank_holds_up_its_neighbours_first_and_then_everyone_by_as_much():
    """Rank 2 comes 1000 ns late. Its own chunk is the last that each of the others receives."""
    program = alike(FOUR, op("all_gather", 400), late=2)
    delays = [Delays(), Delays(start=1000)]
    flows, steps = (run(program, Costs(cluster()), delays) for run in (as_flows, as_steps))
    assert rows(steps, source=3) == [(0, 3, 5, 107), (1, 3, 1107, 1209), (2, 3, 1209, 1311)]
    assert rows(steps, source=0) == [(0, 0, 5, 107), (1, 0, 107, 209), (2, 0, 1209, 1311)]
    assert rows(steps, source=1) == [(0, 1, 1005, 1107), (1, 1, 1107, 1209), (2, 1, 1209, 1311)]
    assert rows(steps, source=2) == [(0, 2, 1005, 1107), (1, 2, 1107, 1209), (2, 2, 1209, 1311)]
    assert steps.step_time_ns == flows.step_time_ns == 1311
    assert steps.ranks[0].starts[0] == 0
    assert flows.ranks[0].starts[0] == 1000


def test_a_late_end_of_a_chain_holds_up_nothing_but_itself(monkeypatch):
    """A broadcast goes on as far as ranks are there, where a flow waits for all of them."""
    monkeypatch.setattr("zsim.cluster.collectives.ring.BROADCAST_SLICE_NBYTES", 100)
    program = alike(FOUR, op("broadcast", 200), late=3)
    delays = [Delays(), Delays(start=1000)]
    flows, steps = (run(program, Costs(cluster()), delays) for run in (as_flows, as_steps))
    assert [steps.ranks[rank].ends[0] for rank in range(4)] == [209, 311, 1209, 1209]
    assert [flows.ranks[rank].ends[0] for rank in range(4)] == [1413] * 4


def test_the_hop_over_a_slow_link_is_busy_and_the_others_wait_for_it():
    """Four hosts on rails of 1 byte/ns, one with a link of a quarter of that."""
    spec = cluster(nodes=4)
    slow = replace(spec, slow_rails=(SlowRail(node=1, nic=0, bandwidth=250 * 10**6),))
    steps = as_steps(alike(FOUR, op("all_gather", 400)), Costs(slow))
    busy = {
        rank: sum(end - start for *_, start, end in rows(steps, source=rank)) for rank in range(4)
    }
    assert busy == {0: 3 * 404, 1: 3 * 404, 2: 3 * 104, 3: 3 * 104}
    assert steps.step_time_ns == 5 + 3 * 404
    assert [steps.ranks[rank].ends[0] for rank in range(4)] == [1217, 1217, 1217, 917]


def test_rings_take_turns_on_a_link_that_they_all_want(monkeypatch):
    """Two hosts of two ranks, with slices of 50 ns.

    By each NIC go the ring of all, W, and two rings of two, A and B. W has 100 bytes in each of
    three steps and 3 ns of latency; A and B have 200 bytes in one step.

    W's first chunk goes in the first and fourth turn: W A B W. It comes again when A's turn has
    begun: A B W A B W, and A B W W in the end.
    """
    monkeypatch.setattr(links, "SLICE_NBYTES", 50)
    of_all = op("all_gather", 400, group="world")
    of_two = op("all_gather", 400, group="dp_replicate", index=1)
    program, costs = alike(SQUARE, of_all, of_two), Costs(cluster(nodes=2))
    steps = as_steps(program, costs)
    assert rows(steps, source=1, group="world") == [
        (0, 1, 5, 208),
        (1, 1, 208, 508),
        (2, 1, 508, 708),
    ]
    assert rows(steps, source=0, group="dp_replicate") == [(0, 0, 5, 559)]
    assert rows(steps, source=1, group="dp_replicate") == [(0, 1, 5, 609)]
    assert steps.step_time_ns == 5 + 3 * 100 + 2 * 200 + 3
    lost = {hop.lost_ns for hop in steps.hops if hop.group == "world" and hop.link == "rail"}
    assert lost == {100, 197, 97}
    alone = as_flows(program, costs, contention=False).step_time_ns
    assert {times.shared[0] for times in steps.ranks.values()} == {708 - (5 + 3 * 103)}
    assert alone == 409  # rings of two have half a NIC each


def test_a_rank_s_own_delay_is_shared_out_over_its_steps():
    program = alike(FOUR, op("all_gather", 400), late=1)
    delays = [Delays(), Delays(longer={0: 301})]
    flows, steps = (run(program, Costs(cluster()), delays) for run in (as_flows, as_steps))
    assert [end - start for *_, start, end in rows(steps, source=1)] == [202, 202, 203]
    assert steps.step_time_ns == flows.step_time_ns == 311 + 301


@pytest.mark.parametrize("size", [1, 2])
def test_groups_of_one_take_nothing_and_of_two_pass_a_chunk_each_way(size):
    mesh = Mesh(dp_replicate=2 // size, dp_shard=size)
    steps = as_steps(alike(mesh, op("all_gather", 400)), Costs(cluster(ranks=2)))
    assert rows(steps) == ([(0, 0, 5, 207), (0, 1, 5, 207)] if size == 2 else [])
    assert steps.step_time_ns == (207 if size == 2 else 0)


def test_a_ring_is_not_in_its_own_way_where_another_passes():
    """A card next to the only NIC sends to it and to the next card over the same x16 link."""
    mesh, costs = Mesh(dp_replicate=2, dp_shard=16), Costs(load_cluster("pcie-box", nodes=4))
    long, short = op("all_reduce", 10**8), op("all_gather", 1000, group="dp_replicate", index=1)
    together = as_steps(alike(mesh, long, short), costs).step_time_ns
    assert together < 1.01 * as_steps(alike(mesh, long), costs).step_time_ns
