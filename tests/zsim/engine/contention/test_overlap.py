"""Losses of kernels and collectives beside one another, by hand: each is longer by its share of the
time in which the other runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.folders import SCENARIOS
from tests.support.programs.hand_made import (
    TWO,
    TWO_BY_TWO,
    Plain,
    all_reduce,
    compute,
    gather,
    program,
)
from zsim.engine.contention.overlap import overlap_losses
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.engine.simulate import Delays, simulate
from zsim.engine.simulate_step import simulate_step
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Kernel, Location, Op, OpKind, Stream
from zsim.scenario import scenario
from zsim.scenario.plan import plan


def copy(index: int, *kernels: Kernel, stream: Stream = "reduce_scatter") -> Op:
    """Kernels on a stream beside that of compute."""
    return Op(index=index, kind="copy", unit="b", stream=stream, kernels=kernels)


def ends(
    *ops: Op, mesh: Mesh = TWO, kernels: float = 0.0, collectives: float = 0.0, **more: Any
) -> list[int]:
    """Ends of ops that are the same on all ranks; kernels and collectives lose such shares."""
    costs = Plain(
        share=kernels, collective_interference=collectives, one_link="to_waiting" in more, **more
    )
    return list(simulate_step(program(*ops, mesh=mesh), costs=costs).ranks[0].ends)


@pytest.mark.parametrize(("kernels", "collectives", "expected"), [
    (0.0, 0.0, [100, 40, 200, 230]), (0.25, 0.0, [110, 40, 210, 240]),
    (0.0, 0.1, [100, 44, 200, 230]),
    # the gather lasts 40 / 0.9, and of that the forward loses a quarter
    (0.25, 0.1, [111, 44, 211, 241]),
])
def test_each_is_longer_by_its_share_of_the_time_in_which_the_other_runs(
    kernels: float, collectives: float, expected: list[int]
) -> None:
    """A forward beside a gather of 40, and a backward between that gather and one of 30."""
    ops = (
        compute(0, "a", 100), gather(1, "b", 40), compute(2, "a", 100, 1, kind="backward"),
        gather(3, "b", 30, 2),
    )
    assert ends(*ops, kernels=kernels, collectives=collectives) == expected


@pytest.mark.parametrize(
    "name", ["published/llama-3-8b-8-h100", "published/hsdp-llama-3-8b-4x8-h100"]
)
def test_collectives_of_a_step_are_longer_beside_kernels_and_only_there(name: str) -> None:
    case = scenario.load(SCENARIOS / f"{name}.toml")
    slowed = replace(case.cluster.device, collective_interference=0.1)
    program, costs = plan(case, device="cuda"), Costs(replace(case.cluster, device=slowed))
    off = Costs(cluster=case.cluster, execution=Execution(interference=False))
    times, alone = (simulate_step(program, costs=version).ranks[0] for version in (costs, off))
    moving = [op.index for op in program.ranks[0].steady if op.kind in COLLECTIVES]
    longer = [(times.ends[i] - times.starts[i]) / (alone.ends[i] - alone.starts[i]) for i in moving]
    assert max(longer) > 1.05
    # before any kernel
    assert (
        times.ends[moving[0]] - times.starts[moving[0]]
        == alone.ends[moving[0]] - alone.starts[moving[0]]
    )


@pytest.mark.parametrize("kind", ["forward", "backward", "recompute", "optimizer", "copy"])
def test_every_kind_of_kernel_loses(kind: OpKind) -> None:
    """Whatever runs on the compute stream beside a collective, recomputation and the optimizer
    among it."""
    assert ends(compute(0, "a", 100, kind=kind), gather(1, "b", 40), kernels=0.25) == [110, 40]


@pytest.mark.parametrize("slower", [0, 1])
def test_a_collective_is_as_long_as_for_the_rank_that_is_slowed_down_most(slower: int) -> None:
    """A gather of 40 that is longer by 25 on one rank and by 10 on the other ends after 65 on both.
    """
    step = program(gather(0, "b", 40))
    apart = replace(step, ranks=step.ranks * 2, assignment=(0, 1))
    delays = [Delays({0: 25 if rank == slower else 10}) for rank in range(2)]
    timeline = simulate(apart, costs=Plain(one_link=False), all_ranks=True, delays=delays)
    assert [times.ends[0] for times in timeline.ranks.values()] == [65, 65]


def test_a_kernel_loses_to_each_collective_beside_it_what_that_takes() -> None:
    """100 beside gathers of 20 and of 30 at once, on communicators of their own: a quarter of 20
    and half of 30."""
    ops = compute(0, "a", 100), gather(1, "b", 20), all_reduce(2, "c", 30), compute(3, "a", 10)
    expected = [100 + 5 + 15, 20, 30, 130]
    assert ends(*ops, mesh=TWO_BY_TWO, kernels=0.25, twice_beside=30) == expected


@pytest.mark.parametrize("share", [0.5, 0.7, 0.95])
def test_what_runs_beside_a_kernel_leaves_it_a_tenth_of_its_time(share: float) -> None:
    """A forward of 100 takes at most ten times as long, however late in the step. Beside it run two
    collectives that outlast it; each takes half of its time or more."""
    before, after, *others = ends(
        compute(0, "a", 9000), compute(1, "a", 100), gather(2, "b", 5000, 0),
        all_reduce(3, "c", 5000, 0), mesh=TWO_BY_TWO, kernels=share,
    )
    assert 500 < after - before <= 1000
    assert [before, *others] == [9000, 14000, 14000]


def test_a_collective_that_others_hold_up_moves_its_bytes_as_much_slower() -> None:
    """Gathers of 20 and of 30 share a link: the first ends at 40, at half its speed, the other at
    50, at three fifths.

    A forward of 100 beside them loses a tenth of both to their channels, 4 + 5. To their bytes it
    loses a fifth of 20 + 30.
    """
    ops = compute(0, "a", 100), gather(1, "b", 20), all_reduce(2, "c", 30)
    expected = [100 + 4 + 5 + 10, 40, 50]
    assert ends(*ops, mesh=TWO_BY_TWO, kernels=0.3, to_waiting=0.1) == expected


def test_a_collective_that_kernels_hold_up_moves_no_more_bytes() -> None:
    """A gather of 72 takes 80 beside a forward, which loses a tenth of the 80 and a quarter of the
    72."""
    ops, expected = (compute(0, "a", 1000), gather(1, "b", 72)), [1000 + 8 + 18, 80]
    assert ends(*ops, kernels=0.35, collectives=0.1, to_waiting=0.1) == expected


CAST, SENT = Kernel("copy", 4, 0, "float32"), Kernel("to_host", 26, 0, "float32", "link")


@pytest.mark.parametrize(("kernels", "flops", "expected"), [
    ((CAST, SENT), 100, [104, 34]), ((SENT, CAST), 100, [104, 34]),
    # it is over before the cast behind a transfer begins
    ((CAST, SENT), 10, [14, 34]), ((SENT, CAST), 10, [10, 30]),
])
def test_of_an_op_that_casts_and_sends_to_the_host_the_cast_alone_is_on_the_device(
    kernels: tuple[Kernel, ...], flops: int, expected: list[int]
) -> None:
    """A backward beside a cast of 4 and a transfer of 26, in either order. Where the cast runs
    beside it both lose 4, and no more."""
    assert ends(compute(0, "a", flops, kind="backward"), copy(1, *kernels)) == expected


@pytest.mark.parametrize(
    ("location", "expected"), [("device", [130, 60]), ("link", [100, 30]), ("host", [100, 30])]
)
def test_kernels_of_two_streams_take_as_long_side_by_side_as_one_after_another(
    location: Location, expected: list[int]
) -> None:
    """A backward of 100 beside a copy of 30 on another stream; a transfer to the host takes nothing
    of the device."""
    copied = copy(1, Kernel("copy", 30, 0, "float32", location))
    assert ends(compute(0, "a", 100, kind="backward"), copied) == expected


def test_kernels_of_three_streams_have_a_third_of_the_device_each_while_all_three_run() -> None:
    """Copies of 20 and of 30 run beside a backward of 100. They end after 60 and 80, and the
    backward after 150: the sum of all three."""
    twenty, thirty = (Kernel("copy", flops, 0, "float32") for flops in (20, 30))
    copies = copy(1, twenty, stream="all_gather_copy_in"), copy(2, thirty)
    assert ends(compute(0, "a", 100, kind="backward"), *copies) == [150, 60, 80]


@pytest.mark.parametrize(("gathered", "ended"), [(400, 133), (40, 110), (120, 130)])
def test_what_is_lost_is_a_share_of_the_time_with_it(gathered: int, ended: int) -> None:
    """A forward of 100 has three quarters of its device: beside a longer gather until it ends,
    beside one of 40 until that does."""
    assert ends(compute(0, "a", 100), gather(1, "b", gathered), kernels=0.25)[0] == ended


COPIES_BESIDE_BACKWARD = """
model = { preset = "mpt-1b" }
batch = { micro_batch = 1, sequence_length = 512, accumulation = 2 }
cluster = { preset = "dgx-a100-40" }
strategy = { name = "fsdp1", dp_replicate = 2, dp_shard = 4, sync = "last" }
precision = { parameters = "bf16", reduce = "fp32" }
optimizer = { name = "adamw", implementation = "fused" }
activation_checkpointing = { mode = "full" }
"""


def test_links_twice_as_fast_do_not_make_a_step_slower_in_which_much_runs_at_once() -> None:
    """FSDP1's copies beside its backward: what they lose to one another is found in rounds, as one
    alone overshoots."""
    case = scenario.parse(COPIES_BESIDE_BACKWARD.encode(), where="fsdp1.toml")
    program = plan(case, device="cuda")
    fabric = case.cluster.links.fabric
    links = replace(case.cluster.links, fabric=replace(fabric, bandwidth=2 * fabric.bandwidth))
    clusters = case.cluster, replace(case.cluster, links=links)
    slow, fast = (
        simulate_step(program, costs=Costs(cluster=cluster, execution=case.executed)).step_time_ns
        for cluster in clusters
    )
    assert fast < slow


def test_rounds_go_on_until_a_step_has_settled() -> None:
    """A few rounds leave a per cent or two of such steps."""
    case = scenario.parse(COPIES_BESIDE_BACKWARD.encode(), where="fsdp1.toml")
    program, costs = plan(case, device="cuda"), Costs(cluster=case.cluster, execution=case.executed)
    settled = simulate_step(program, costs=costs)
    lost = overlap_losses(program, settled, costs=costs, lengthened=True)
    again = simulate(
        program, costs=costs,
        delays=[Delays(lost.get(kind, {}), {}) for kind in range(len(program.ranks))],
    )
    assert again.step_time_ns == pytest.approx(settled.step_time_ns, rel=0.003)
