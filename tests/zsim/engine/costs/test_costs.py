"""Costs: the device by its own model, collectives through the cluster's links, answers that no
earlier question changes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases.sampling import collectives
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.devices import load_device
from zsim.engine.costs import kernel_time
from zsim.engine.costs.issue_times import CALLS
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError
from zsim.ir.ops import ACCUMULATE, MOVE_GRADIENT, Kernel, Op, OpKind
from zsim.scenario import scenario

H100 = Costs(load_cluster("dgx-h100", nodes=4))


def test_kernels_take_what_the_device_says_and_on_several_nodes_the_slowest_is_longer() -> None:
    kernel = Kernel("linear", 2 * 4096**3, 0, "bfloat16", shape=(1, 4096, 4096, 4096))
    alone = Costs(load_cluster("dgx-h100")).kernel_ns(kernel)
    assert alone == kernel_time.kernel_ns(kernel, load_device("h100-80"))
    assert H100.kernel_ns(kernel) == ceil(alone * 1.02)  # four nodes: two doublings of 1 %


def test_an_op_takes_the_sum_of_its_kernels_and_nothing_takes_no_time() -> None:
    kernels = (Kernel("gelu", 0, 10**6, "float32"), Kernel("linear", 10**9, 0, "float32"))
    assert H100.compute_ns(kernels) == sum(H100.kernel_ns(kernel) for kernel in kernels)
    assert H100.compute_ns(()) == 0


@pytest.mark.parametrize(
    ("accumulation", "moves", "adds"),
    [("eager", True, True), ("fp32", False, True), ("fused", False, False)],
)
def test_gradients_that_lie_in_the_buffer_that_is_reduced_are_not_moved(
    accumulation: str, moves: bool, adds: bool
) -> None:
    costs = Costs(H100.cluster, Execution(accumulation=accumulation))  # type: ignore[arg-type]
    for operator, runs in ((MOVE_GRADIENT, moves), (ACCUMULATE, adds)):
        kernel = Kernel(operator, 0, 10**9, "bfloat16")
        assert (costs.kernel_ns(kernel) > 0) == runs
        assert (
            costs.issue_ns(Op(index=0, kind="copy", unit="a", stream="compute", kernels=(kernel,)))
            > 0
        ) == runs


def test_on_a_cpu_even_an_empty_kernel_takes_a_nanosecond() -> None:
    assert Costs(load_cluster("cpu-gloo", ranks=2)).kernel_ns(Kernel("gelu", 0, 0, "float32")) == 1


def test_an_all_gather_in_a_node_takes_nccl_s_sum_and_what_torch_adds() -> None:
    """Not the ring's steps alone, 676 µs. Its start is 11 + 8.4 + 7 · 3.4 µs, its links reach 1.03
    · 360 GB/s. The time of a rank's part is idle, and 8.5 µs are torch's."""
    wire = (2**28 * 7 / 8 + 2**28 / 8) / (360e3 * 1.03)
    microseconds = 11 + 8.4 + 7 * 3.4 + wire + 8.5
    assert (
        H100.collective_ns("all_gather", 2**28, tuple(range(8)))
        == ceil(microseconds * 1000)
        == 775_636
    )


def test_a_cluster_whose_library_is_the_ring_takes_its_steps_and_a_collectives_start() -> None:
    costs = Costs(replace(H100.cluster, collectives="ring"))
    chunk_ns = -(-(2**28) // 8 * 10**9 // (360 * 10**9))
    assert costs.collective_ns("all_gather", 2**28, tuple(range(8))) == 8500 + 7 * (3400 + chunk_ns)


def test_nccl_is_asked_only_where_the_preset_describes_it() -> None:
    costs = Costs(replace(H100.cluster, nccl=None))
    with pytest.raises(ScenarioError, match='^cluster dgx-h100: expected a table "nccl", found '
                                            'none'):
        costs.collective_ns("all_gather", 2**28, (0, 1))


def test_one_rank_communicates_in_no_time() -> None:
    assert H100.collective_ns("all_reduce", 10**9, (5,)) == 0


def test_groups_of_the_same_size_in_other_places_are_told_apart() -> None:
    costs = Costs(load_cluster("dgx-h100", nodes=4))
    inside = costs.collective_ns("all_reduce", 2**20, (0, 1, 2, 3))
    across = costs.collective_ns("all_reduce", 2**20, (0, 8, 16, 24))
    assert inside < across
    assert (inside, across) == tuple(
        Costs(costs.cluster).collective_ns("all_reduce", 2**20, ranks)
        for ranks in ((0, 1, 2, 3), (0, 8, 16, 24))
    )


@given(st.lists(
    st.tuples(
        collectives, st.integers(0, 2**24),
        st.sampled_from([(0, 1), (0, 8), tuple(range(16)), (1, 9, 17)]),
    ),
    max_size=12,
))
def test_what_was_asked_before_changes_no_answer(
    questions: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    costs = Costs(H100.cluster)
    twice = [costs.collective_ns(*question) for question in questions + questions]
    assert twice == [Costs(H100.cluster).collective_ns(*question) for question in questions] * 2


@pytest.mark.parametrize("ranks", [(0, 1, 7, 8), (0, 2, 9, 15), (0, 1, 2, 9), (0, 2, 8, 6)])
def test_ranks_that_are_not_evenly_spaced_are_laid_as_they_are(ranks: tuple[int, ...]) -> None:
    """Ranks on two nodes are as slow as new `Costs` say. They are slower than the even group that
    begins as they do."""
    costs = Costs(load_cluster("dgx-h100", nodes=2))
    even = tuple(range(0, 4 * (ranks[1] - ranks[0]), ranks[1] - ranks[0]))
    inside = costs.collective_ns("all_reduce", 2**28, even)
    uneven = costs.collective_ns("all_reduce", 2**28, ranks)
    assert uneven == Costs(costs.cluster).collective_ns("all_reduce", 2**28, ranks) > inside


def test_a_rank_less_on_one_node_than_on_the_other_has_fewer_links() -> None:
    costs = Costs(load_cluster("dgx-h100", nodes=2))
    assert costs.collective_ns("all_gather", 2**28, (4, 5, 6, 7, 8)) == costs.collective_ns(
        "all_gather", 2**28, (0, 1, 2, 3, 8)
    )
    uneven, even = (
        costs.collective_ns("all_gather", 2**28, ranks) for ranks in ((0, 1, 2, 8), (6, 7, 8, 9))
    )
    assert uneven > even


def test_kernels_that_are_gone_do_not_answer_for_new_ones() -> None:
    costs = Costs(H100.cluster)
    times = [
        costs.compute_ns((Kernel("gelu", 0, size, "float32"),)) for size in range(0, 10**8, 10**6)
    ]
    assert times == [
        costs.kernel_ns(Kernel("gelu", 0, size, "float32")) for size in range(0, 10**8, 10**6)
    ]


def test_gloo_pays_twice_for_a_reduce_scatter() -> None:
    costs = Costs(load_cluster("cpu-gloo", ranks=4))
    assert costs.bytes_sent("reduce_scatter", 4000, group_size=4) == 6000
    assert H100.bytes_sent("reduce_scatter", 4000, group_size=4) == 3000


def test_gloos_reduce_scatter_takes_longer_than_an_all_reduce_since_it_copies_its_slice() -> None:
    costs = Costs(load_cluster("cpu-gloo", ranks=4))
    start, ranks = costs.cluster.overheads.collective, (0, 1, 2, 3)
    reduced = costs.collective_ns("all_reduce", 4000, ranks) - start
    assert costs.collective_ns("reduce_scatter", 4000, ranks) - start == -(-reduced * 105 // 100)


@pytest.mark.parametrize(("op", "megabytes", "num_ranks", "milliseconds"), [
    ("all_reduce", 1, 2, 9.3), ("all_reduce", 4, 2, 36.2), ("all_reduce", 16, 2, 144.5),
    ("all_reduce", 1, 4, 13.7), ("all_reduce", 4, 4, 56.8), ("all_reduce", 16, 4, 243),
    ("all_gather", 4, 2, 27.8), ("all_gather", 16, 2, 110), ("all_gather", 4, 4, 30.5),
    ("all_gather", 16, 4, 148),
])
def test_gloo_over_links_of_one_gigabit_takes_what_was_measured_within_a_fifth(
    op: str, megabytes: int, num_ranks: int, milliseconds: float
) -> None:
    """One rank per host; all-gather has the widest scatter, 113 to 155 % of an all-reduce's rate.
    """
    costs = Costs(load_cluster("cpu-gloo", nodes=num_ranks, ranks=num_ranks))
    predicted = costs.collective_ns(op, megabytes * 2**20, tuple(range(num_ranks)))
    assert predicted == pytest.approx(milliseconds * 10**6, rel=0.2)


@pytest.mark.parametrize(("op", "expected"), [
    (Op(index=0, kind="all_gather", unit="u", stream="all_gather", group="dp_shard", nbytes=8),
     35_000),
    (
        Op(
            index=0, kind="forward", unit="u", stream="compute",
            kernels=(Kernel("gelu", 0, 8, "float32"),) * 3,
        ),
        126_000,
    ),
    (Op(index=0, kind="free", unit="u", stream="host"), 0),
])
def test_the_host_pays_per_collective_and_per_operator(op: Op, expected: int) -> None:
    assert H100.issue_ns(op) == expected


def test_a_call_of_a_traced_model_takes_the_host_a_part_of_what_an_operator_does() -> None:
    """Calls that make one operator of a block take it as long as that."""
    costs = Costs(load_cluster("dgx-h100"), Execution(by_call=True))
    call = Op(
        index=0, kind="backward", unit="u", stream="compute",
        kernels=(Kernel("mul", 0, 8, "float32"),),
    )
    assert costs.issue_ns(call) == round(42_000 / CALLS) > 9_000


@pytest.mark.parametrize(("strategy", "kind", "expected"), [
    ("fsdp2", "all_gather", 685_000), ("fsdp1", "reduce_scatter", 685_000),
    ("fsdp2", "all_reduce", 35_000), ("zero3", "all_gather", 35_000), ("ddp", "all_reduce", 35_000),
])
def test_hooks_of_fsdp_take_the_host_longer_to_issue_what_they_gather_and_reduce(
    strategy: str, kind: OpKind, expected: int
) -> None:
    axes = ", dp_replicate = 1, dp_shard = 8" if strategy == "fsdp1" else ""
    text = f"""
model = {{ preset = "gpt-tiny" }}
batch = {{ micro_batch = 1, sequence_length = 64 }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "{strategy}"{axes} }}
"""
    asked = scenario.parse(text.encode(), where="hooks.toml")
    op = Op(index=0, kind=kind, unit="u", stream="all_gather", group="dp_shard", nbytes=8)
    assert Costs(asked.cluster, asked.executed).issue_ns(op) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_inside_a_node_and_one_across_nodes_have_their_own_times(order: int) -> None:
    """The numbers of both groups are equally far apart: 0, 1, 2 share a node, and 6, 7, 8 do not.
    """
    costs = Costs(load_cluster("dgx-h100", nodes=2))
    groups = [(0, 1, 2), (6, 7, 8)][::order]
    times = {group: costs.collective_ns("all_gather", 3 * 2**20, group) for group in groups}
    assert times[6, 7, 8] > times[0, 1, 2]
