"""The engine's clock against a second, independent computation of the same times, and its laws."""

from dataclasses import replace

import pytest

from tests.support.folders import SCENARIOS
from tests.support.programs.hand_made import Plain, compute, program
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate import simulate
from zsim.engine.timeline import Delays
from zsim.errors import DeadlockError
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op
from zsim.ir.program import Program, RankProgram
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import plan

GPU = [
    "published/llama-3-8b-8-h100", "published/hsdp-llama-3-8b-4x8-h100",
    "overlap/zero3-llama-3-8b-8-lookahead-0", "overlap/zero3-llama-3-8b-8-lookahead-1",
]
CPU = [
    "parity/fsdp2-uneven-4", "parity/hsdp-gpt-2x2", "parity/zero-redundancy-mlp-2",
    "parity/fsdp2-mlp-4-reshard-to-2",
]


def planned(name: str) -> tuple[Program, Costs]:
    case = scenario.load(SCENARIOS / f"{name}.toml")
    return plan(case, device=case.cluster.kind), Costs(cluster=case.cluster)


def with_queue(costs: Costs, launch_queue: int) -> Costs:
    return replace(
        costs,
        cluster=replace(
            costs.cluster, device=replace(costs.cluster.device, launch_queue=launch_queue)
        ),
    )


def test_a_host_is_never_farther_ahead_than_its_launch_queue_allows():
    """Launched kernels that are not over never exceed the queue, where every op has fewer."""
    program, costs = planned("published/llama-3-8b-8-h100")
    ops = [op for op in program.ranks[0].steady if op.stream == "compute" and op.kernels]
    room = 2 * max(len(op.kernels) for op in ops)
    steps = {queue: simulate(program, costs=with_queue(costs, queue)) for queue in (room, 0)}
    for queue, timeline in steps.items():
        times = timeline.ranks[0]
        ahead = max(
            sum(
                len(op.kernels) for op in ops[: index + 1]
                if times.ends[op.index] > times.issued[last.index] - costs.issue_ns(last)
            )
            for index, last in enumerate(ops)
        )
        assert (ahead < room + max(len(op.kernels) for op in ops)) is (queue == room)


def test_a_slow_host_gains_nothing_from_a_shorter_queue():
    """Steps grow longer, never shorter, as the queue gets shorter; a queue that holds the whole
    step changes nothing."""
    program, costs = planned("published/llama-3-8b-8-h100")
    steps = [
        simulate(program, costs=with_queue(costs, queue)).step_time_ns
        for queue in (1, 50, 1024, 10**6, 0)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == steps[-2] < steps[0]


@pytest.mark.parametrize("preset", ["dgx-h100", "p4d"])
@pytest.mark.parametrize(
    ("nodes", "replicate", "shard"),
    [(3, 8, 3), (3, 3, 8), (2, 4, 4), (3, 2, 12), (2, 5, 3), (5, 3, 13), (3, 2, 9), (4, 5, 6)],
)
def test_folded_ranks_take_the_time_of_all_ranks_when_some_groups_cross_nodes_and_others_do_not(
    preset, nodes, replicate, shard
):
    text = (
        'model = { preset = "llama-3-8b", num_layers = 4 }\nbatch = { micro_batch = 1, '
        'sequence_length = 512 }\n'
        f'cluster = {{ preset = "{preset}", nodes = {nodes}, ranks = {replicate * shard} }}\n'
        f'strategy = {{ name = "hsdp", dp_replicate = {replicate}, dp_shard = {shard} }}\n'
        'precision = { parameters = "bf16", reduce = "fp32" }\n'
    )
    case = scenario.parse(text.encode(), where="uneven.toml")
    program, costs = plan(case, device="cuda"), Costs(cluster=case.cluster)
    folded, whole = simulate(program, costs=costs), simulate(program, costs=costs, all_ranks=True)

    assert folded.step_time_ns == whole.step_time_ns
    unfolded = {rank: folded.ranks[like] for rank, like in enumerate(folded.representatives)}
    assert unfolded == whole.ranks


@pytest.mark.parametrize(("nodes", "replicate", "shard", "fewer"), [
    (4, 1, 32, True), (5, 1, 39, True), (4, 2, 16, True), (4, 4, 8, True), (3, 2, 9, False),
])
def test_nodes_whose_ranks_are_alike_stand_for_one_another_where_ranks_share_their_host(
    nodes: int, replicate: int, shard: int, fewer: bool
) -> None:
    """Rows of odd vocabularies and layers are shared out unevenly, and copies contend in a node."""
    case = scenario.Scenario(
        model={"family": "gpt", "sizes": {
            "num_layers": 3, "hidden_size": 64, "num_heads": 2, "vocabulary": 4099, "tied": False,
        }},
        batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": "dgx-h100", "nodes": nodes, "ranks": replicate * shard},
        strategy={"offload": True, **(
            {"name": "hsdp", "dp_replicate": replicate, "dp_shard": shard} if replicate > 1
            else {"name": "fsdp2"}
        )},
    )
    program, costs = plan(case, device="cuda"), Costs(cluster=case.cluster)
    folded, whole = simulate(program, costs=costs), simulate(program, costs=costs, all_ranks=True)

    assert len(program.ranks) > 1
    assert (len(set(folded.representatives)) < case.world_size) is fewer
    unfolded = {rank: folded.ranks[like] for rank, like in enumerate(folded.representatives)}
    assert unfolded == whole.ranks


def test_lookahead_of_one_hides_what_can_be_hidden_and_of_two_nothing_more():
    times = []
    for lookahead in range(3):
        program, costs = planned(f"overlap/zero3-llama-3-8b-8-lookahead-{lookahead}")
        times.append(simulate(program, costs=costs).step_time_ns)
    assert times[0] > times[1] == times[2]


COSTS_OF_FOUR = Costs(cluster=load_cluster("dgx-h100", ranks=4))


def collective(index: int, group: str, unit: str = "a") -> Op:
    return Op(
        index=index, kind="all_reduce", unit=unit, stream="all_reduce", group=group, nbytes=64
    )


@pytest.mark.quality
def test_ranks_that_issue_collectives_in_different_orders_are_named():
    """Rank 0 reduces over its replicas first, the others over all ranks; nobody meets."""
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    ordered = (collective(0, "world"), collective(1, "dp_replicate"))
    swapped = (collective(0, "dp_replicate"), collective(1, "world"))
    kinds = tuple(RankProgram(construction=(), first=(), steady=ops) for ops in (swapped, ordered))
    program = Program(mesh=mesh, ranks=kinds, assignment=(0, 1, 1, 1))
    with pytest.raises(DeadlockError) as caught:
        simulate(program, costs=COSTS_OF_FOUR, all_ranks=True)
    assert [line.rstrip() for line in str(caught.value).splitlines()] == [
        "simulation: expected ranks of one group to issue the same collectives in the same order, "
        "found a deadlock of ranks 0, 1, 2, 3:",
        "  rank  waits in                                 for     first difference",
        "  0     op 0 (all_reduce a), #0 of dp_replicate  rank 2  op 0 (all_reduce a over "
        "dp_replicate, 64 B); on rank 2 op 0 (all_reduce a over world, 64 B)",
        "  2     op 0 (all_reduce a), #0 of world         rank 0  op 0 (all_reduce a over world, "
        "64 B); on rank 0 op 0 (all_reduce a over dp_replicate, 64 B)",
    ]


@pytest.mark.quality
def test_a_rank_that_skips_a_collective_is_named_by_those_that_wait_for_it():
    """Rank 0 issues one collective less, so nothing closes a ring: the table has all that wait."""
    whole = (collective(0, "world"), collective(1, "world", unit="b"))
    kinds = tuple(RankProgram(construction=(), first=(), steady=ops) for ops in (whole[:1], whole))
    program = Program(mesh=Mesh(dp_shard=4), ranks=kinds, assignment=(0, 1, 1, 1))
    with pytest.raises(DeadlockError) as caught:
        simulate(program, costs=COSTS_OF_FOUR, all_ranks=True)
    first, _, *waits = str(caught.value).splitlines()
    assert first.endswith("found a deadlock of ranks 1, 2, 3:")
    assert [line.split() for line in waits] == [
        f"{rank} op 1 (all_reduce b), #1 of world rank 0 op 1 (all_reduce b over world, 64 B); on "
        "rank 0 nothing more".split() for rank in (1, 2, 3)
    ]


def test_ten_runs_are_equal():
    case = scenario.load(SCENARIOS / "parity/fsdp2-uneven-4.toml")
    runs = [SimBackend().run(case, options=RunOptions()) for _ in range(10)]
    assert all(run == runs[0] for run in runs)


def test_a_host_that_waits_issues_what_follows_late_and_the_graph_agrees():
    """The host waits for the first kernel; what it issues afterwards begins only then, though on
    another stream."""
    work = (Kernel("linear", 10**12, 10**6, "bfloat16"),)
    ops = (
        Op(index=0, kind="forward", unit="a", stream="compute", kernels=work),
        Op(index=1, kind="host_wait", unit="a", stream="host", waits=(0,)),
        Op(index=2, kind="copy", unit="a", stream="all_gather", kernels=work),
        Op(index=3, kind="copy", unit="a", stream="all_reduce", kernels=work),
    )
    mesh = Mesh()
    program = Program(
        mesh=mesh, ranks=(RankProgram(construction=(), first=(), steady=ops),), assignment=(0,)
    )
    costs = Costs(cluster=load_cluster("dgx-h100", ranks=1))

    timeline = simulate(program, costs=costs)

    times = timeline.ranks[0]
    issue = costs.issue_ns(ops[2])
    assert times.starts[2] == times.issued[2] == times.ends[0] + issue
    assert times.starts[3] == times.ends[0] + 2 * issue


def test_a_pause_of_the_host_holds_up_all_that_it_issues_afterwards():
    """The second op is issued 150 ns later, and on its stream there was room from 100 ns on."""
    paused = program(compute(0, "a", 100), compute(1, "b", 50))
    timeline = simulate(paused, costs=Plain(), delays=[Delays(later={0: 150})])
    assert [list(timeline.ranks[0].starts), timeline.step_time_ns] == [[0, 150], 200]


def test_groups_that_are_alike_but_for_their_time_are_not_folded_into_one():
    """The second of two groups of six ranks crosses to another node, which takes longer."""
    text = """
model = { family = "mlp", sizes = { dims = [8, 8], hidden = 8, num_classes = 3 } }
batch = { micro_batch = 2 }
cluster = { preset = "dgx-h100", nodes = 2, ranks = 12 }
strategy = { name = "hsdp", dp_replicate = 2, dp_shard = 6 }
"""
    case = scenario.parse(text.encode(), where="crossing.toml")
    crossing, costs = plan(case, device="cuda"), Costs(cluster=case.cluster)
    folded, whole = (
        simulate(crossing, costs=costs, all_ranks=every, contention=False)
        for every in (False, True)
    )
    assert len(set(folded.representatives)) > 1
    assert {rank: times.ends for rank, times in whole.ranks.items()} == {
        rank: folded.ranks[like].ends for rank, like in enumerate(folded.representatives)
    }
