"""Collectives that run at once: ends computed by hand, in the pure model and in the engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction as Part
from itertools import count

import pytest

from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.links import SlowRail
from zsim.engine.contention.link_contention import SharedLinks, contended
from zsim.engine.contention.max_min_fairness import speeds
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op
from zsim.ir.program import Program, RankProgram

ALL = {"link": Part(1)}


@dataclass
class Clock:
    """A clock that calls what is due, in order."""

    time: int = 0
    due: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    number: count[int] = field(default_factory=count)

    def now(self) -> int:
        return self.time

    def after(self, delay: int, call: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.time + delay, next(self.number), call))

    def run(self) -> None:
        while self.due:
            self.time, _, call = heapq.heappop(self.due)
            call()


def ends(flows: list[tuple[int, int, dict[str, Part]]]) -> list[int]:
    """Ends of flows of (begin, nanoseconds alone, usage)."""
    clock, ended = Clock(), [0] * len(flows)
    links = SharedLinks(clock)
    for index, (begin, alone, usage) in enumerate(flows):

        def start(
            index: int = index, alone: int = alone, usage: dict[str, Part] = dict(usage)  # noqa: B006
        ) -> None:
            links.begin(usage, alone, lambda: ended.__setitem__(index, clock.now()))

        clock.after(begin, start)
    clock.run()
    return ended


def test_alone_a_flow_takes_its_own_time() -> None:
    assert ends([(7, 100, ALL)]) == [107]


def test_two_flows_share_from_the_start_of_the_second_to_the_end_of_the_first_that_ends() -> None:
    """The first has 80 left at 20; the second needs 120 at half speed, until 140; then the first
    has 20 left, alone."""
    assert ends([(0, 100, ALL), (20, 60, ALL)]) == [160, 140]


def test_three_equal_flows_end_together_after_three_times_as_long() -> None:
    assert ends([(0, 50, ALL)] * 3) == [150] * 3


def test_flows_on_different_links_do_not_slow_each_other_down() -> None:
    assert ends([(0, 50, {"a": Part(1)}), (0, 50, {"b": Part(1)})]) == [50, 50]


def test_remainders_are_kept_exactly_and_only_an_end_is_rounded_up() -> None:
    """Thirds of a nanosecond are kept. The flow of 10 is over at 30. The flow of 11 then has 1
    left, shared with the last until 32; the last has 1 left."""
    assert ends([(0, 10, ALL), (0, 11, ALL), (0, 12, ALL)]) == [30, 32, 33]
    assert ends([(0, 1, ALL), (0, 2, {"link": Part(1, 3)})]) == [2, 2]


def test_groups_that_need_more_of_a_member_s_link_than_there_is_contend_and_others_do_not() -> None:
    rail, fabric = {"rail": Part(1)}, {"fabric": Part(1)}
    assert contended([{0: rail}, {0: fabric}, {1: rail}]) == [{}, {}, {}]
    assert contended([{0: rail}, {0: rail | fabric, 1: rail | fabric}, {2: rail}]) == [
        {(0, "rail"): Part(1)},
        {
            (0, "rail"): Part(1), (0, "fabric"): Part(1), (1, "rail"): Part(1),
            (1, "fabric"): Part(1),
        },
        {},
    ]
    assert contended([{0: {"rail": Part(1, 2)}}, {0: {"rail": Part(1, 2)}}]) == [{}, {}]


def at_once(*sizes: tuple[str, int]) -> Program:
    """All ranks of 2 × 16 all-reduce over groups at once, each on a stream of its own."""
    streams = ("all_gather", "reduce_scatter", "all_reduce", "all_gather_copy_in")
    ops = tuple(
        Op(
            index=index, kind="all_reduce", unit="u", stream=streams[index], group=group,
            nbytes=nbytes,
        )
        for index, (group, nbytes) in enumerate(sizes)
    )
    rank = RankProgram(construction=(), first=(), steady=ops)
    return Program(mesh=Mesh(dp_replicate=2, dp_shard=16), ranks=(rank,), assignment=(0,) * 32)


COSTS = Costs(load_cluster("dgx-a100", nodes=4))


@pytest.mark.parametrize("all_ranks", [False, True])
def test_two_groups_across_nodes_share_the_rails_of_their_members_until_the_shorter_ends(
    all_ranks: bool
) -> None:
    """Both take all of a rank's rail: from the second's start each runs at half speed; what is left
    afterwards runs alone."""
    large, small = 2**28, 2**24
    program = at_once(("dp_shard", large), ("dp_replicate", small))
    alone = COSTS.collective_ns("all_reduce", large, tuple(range(16)))
    short = COSTS.collective_ns("all_reduce", small, (0, 16))
    issue = COSTS.issue_ns(program.ranks[0].steady[0])

    timeline = simulate(program, costs=COSTS, all_ranks=all_ranks)

    times = timeline.ranks[0]
    assert COSTS.usage(tuple(range(16)))[0]["rail"] == COSTS.usage((0, 16))[0]["rail"] == 1
    assert list(times.starts) == [issue, 2 * issue]
    assert list(times.ends) == [issue + alone + short, 2 * issue + 2 * short]
    assert simulate(program, costs=COSTS, contention=False).ranks[0].ends == [
        issue + alone, 2 * issue + short
    ]


def test_a_group_inside_a_node_and_one_along_the_rails_do_not_contend() -> None:
    costs = Costs(load_cluster("dgx-h100", nodes=4))
    assert costs.usage(tuple(range(8))) == {rank: {"fabric": 1} for rank in range(8)}
    assert costs.usage((0, 8, 16, 24)) == {rank: {"rail": 1} for rank in (0, 8, 16, 24)}
    assert costs.usage(tuple(range(16))) == {
        rank: {"fabric": 1, "rail": Part(360, 384)} for rank in range(16)
    }
    assert costs.usage((3,)) == {}


def test_a_ring_over_a_whole_node_and_one_rank_more_takes_an_eighth_of_that_node_s_rails() -> None:
    """The ring is as wide as the one NIC of the ninth rank, which has no fabric to use. Each of the
    first node's eight NICs carries an eighth of that."""
    cluster = load_cluster("dgx-h100", nodes=2, ranks=9)
    usage = cluster.usage(tuple(range(9)))
    assert usage == {
        **{rank: {"fabric": Part(48, 360), "rail": Part(1, 8)} for rank in range(8)},
        8: {"rail": Part(1)},
    }


def test_what_an_uneven_ring_leaves_of_a_rail_others_have() -> None:
    """HSDP of 2 × 9: the ring over 0 to 8 is held up where 8 shares its NIC with (8, 17). The ring
    then takes a sixteenth of rank 0's NIC."""
    cluster = load_cluster("dgx-h100", nodes=3, ranks=18)
    mesh = Mesh(dp_replicate=2, dp_shard=9)
    groups = (tuple(range(9)), *mesh.groups("dp_replicate"))
    usage = dict(
        zip(groups, speeds(contended([cluster.usage(group) for group in groups])), strict=True)
    )
    assert usage[groups[0]] == usage[8, 17] == Part(1, 2)
    assert usage[0, 9] == Part(15, 16)


def test_a_slow_rail_is_full_where_its_ring_is_as_wide_and_the_others_of_its_node_are_not() -> None:
    """12 of 24 GB/s: eight channels of 12 GB/s each take all of that rail and half of every other.
    """
    slow = SlowRail(node=1, nic=3, bandwidth=12 * 10**9)
    usage = replace(load_cluster("dgx-a100", nodes=2), slow_rails=(slow,)).usage(tuple(range(16)))
    assert {rank: parts["rail"] for rank, parts in usage.items()} == {
        rank: 1 if rank == 11 else Part(1, 2) for rank in range(16)
    }


def test_one_communicator_stays_one_queue_though_another_contends_with_it() -> None:
    program = at_once(("dp_shard", 2**20), ("dp_shard", 2**20), ("dp_replicate", 2**26))
    times = simulate(program, costs=COSTS).ranks[0]
    assert times.ends[0] <= times.starts[1]
    assert times.starts[2] < times.ends[0]


def test_what_waits_for_a_communicator_that_contends_runs_in_the_order_of_issue() -> None:
    """Three of one group at once, each of other bytes, while another group takes a part of the same
    rail."""
    program = at_once(
        ("dp_shard", 2**24), ("dp_shard", 2**20), ("dp_shard", 2**22), ("dp_replicate", 2**28)
    )
    for all_ranks in (False, True):
        times = simulate(program, costs=COSTS, all_ranks=all_ranks).ranks[0]
        assert times.starts[3] < times.ends[0]
        assert times.starts[1:3] == times.ends[:2]


def test_what_runs_on_the_device_meanwhile_is_not_delayed() -> None:
    work = (Kernel("linear", 10**12, 10**6, "bfloat16"),)
    busy = at_once(("dp_shard", 2**26), ("dp_replicate", 2**26))
    ops = (
        *busy.ranks[0].steady,
        Op(index=2, kind="forward", unit="u", stream="compute", kernels=work),
    )
    program = Program(
        mesh=busy.mesh, ranks=(RankProgram(construction=(), first=(), steady=ops),),
        assignment=busy.assignment,
    )
    shared, alone = (
        simulate(program, costs=COSTS, contention=each).ranks[0] for each in (True, False)
    )
    assert (shared.starts[2], shared.ends[2]) == (alone.starts[2], alone.ends[2])
