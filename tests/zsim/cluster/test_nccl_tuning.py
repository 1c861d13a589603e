"""NCCL's tuner against its published model figures: latency and bandwidth by hand, bus bandwidths
of known systems."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.collectives.nccl.channel_search import Rails, between_nodes, system
from zsim.cluster.collectives.nccl.tuner import (
    GENERATIONS,
    Algorithm,
    Graph,
    System,
    bus_factor,
    choices,
    choose,
    latency_us,
)

MIB, GIB = 2**20, 2**30
HDR, NDR = Rails(count=8, line_gb_s=25), Rails(count=8, line_gb_s=50)
SYSTEMS: dict[str, System] = {
    "8 V100": system("volta", num_ranks=8), "8 A100": system("ampere", num_ranks=8),
    "8 H100": system("hopper", num_ranks=8),
    "8 H100 without NVLS": system("hopper", num_ranks=8, nvls=False),
    "8 B200": system("blackwell", num_ranks=8), "72 B200": system("blackwell", num_ranks=72),
    "2 x 4 A100, 4 HDR": system(
        "ampere", num_ranks=8, num_nodes=2, rails=Rails(count=4, line_gb_s=25)
    ),
    "2 x 8 A100, 4 HDR": system(
        "ampere", num_ranks=16, num_nodes=2, rails=Rails(count=4, line_gb_s=25), processor="amd"
    ),
    "3 x 8 A100, 4 HDR": system(
        "ampere", num_ranks=24, num_nodes=3, rails=Rails(count=4, line_gb_s=25), processor="amd"
    ),
    "2 x p4d": system("ampere", num_ranks=16, num_nodes=2, rails=Rails(count=4, line_gb_s=12.5)),
    "4 x p4d": system("ampere", num_ranks=32, num_nodes=4, rails=Rails(count=4, line_gb_s=12.5)),
    "2 x 8 A100": system("ampere", num_ranks=16, num_nodes=2, rails=HDR, processor="amd"),
    "2 x 8 H100": system("hopper", num_ranks=16, num_nodes=2, rails=NDR),
    "8 x 8 H100": system("hopper", num_ranks=64, num_nodes=8, rails=NDR),
    "32 x 8 H100": system("hopper", num_ranks=256, num_nodes=32, rails=NDR),
    "2 x 8 H100, 8 x 200G": system("hopper", num_ranks=16, num_nodes=2, rails=HDR),
}
LATENCY_AND_BANDWIDTH = [
    ("8 V100", "all_reduce", "ring", "Simple", 56, 68.6),
    ("8 V100", "all_gather", "ring", "Simple", 32.2, 137.1),
    ("8 V100", "all_gather", "ring", "LL128", 27.3, 126.2),
    ("8 V100", "all_gather", "ring", "LL", 10.8, 44.6),
    ("8 A100", "all_reduce", "ring", "Simple", 56, 137.1),
    ("8 A100", "reduce_scatter", "ring", "Simple", 32.2, 274.3),
    ("8 A100", "reduce_scatter", "ring", "LL128", 27.3, 252.3),
    ("8 A100", "reduce_scatter", "ring", "LL", 10.8, 100.2),
    ("8 H100", "all_reduce", "nvls", "Simple", 25, 272),
    ("8 H100", "all_reduce", "ring", "Simple", 56, 205.7),
    ("8 H100", "all_gather", "ring", "Simple", 32.2, 411.4),
    ("8 H100", "all_gather", "ring", "LL128", 27.3, 378.5),
    ("8 H100", "all_gather", "ring", "LL", 10.8, 161.1),
    ("8 B200", "all_reduce", "nvls", "Simple", 25, 473.6),
    ("8 B200", "all_reduce", "ring", "Simple", 56, 411.4),
    ("8 B200", "all_gather", "ring", "Simple", 32.2, 822.9),
    ("8 B200", "all_gather", "ring", "LL128", 27.3, 731.4),
    ("8 B200", "all_gather", "ring", "LL", 10.8, 322.3),
    ("2 x 8 A100", "all_reduce", "ring", "Simple", 204.4 * 1.4, 102.4),
    ("2 x 8 A100", "all_gather", "ring", "Simple", 106.4, 204.8),
    ("2 x 8 A100", "all_gather", "ring", "LL128", 46, 170.7),
    ("2 x 8 A100", "all_gather", "ring", "LL", 37.3, 24),
    ("2 x 8 H100", "all_reduce", "nvls_tree", "Simple", 66.8, 246.2),
    ("2 x 8 H100", "all_gather", "ring", "Simple", 70, 384),
    ("2 x 8 H100", "all_gather", "ring", "LL128", 44.6, 313.2),
    ("2 x 8 H100", "all_gather", "ring", "LL", 23.3, 41.6),
    ("8 x 8 H100", "all_reduce", "nvls_tree", "Simple", 150.4, 182.9),
    ("8 x 8 H100", "all_gather", "ring", "Simple", 296.8, 365.7),
    ("8 x 8 H100", "all_gather", "ring", "LL128", 148.4, 298.3),
    ("8 x 8 H100", "all_gather", "ring", "LL", 81.5, 20.7),
]


@pytest.mark.parametrize(
    ("name", "op", "algorithm", "protocol", "latency", "rate"), LATENCY_AND_BANDWIDTH
)
def test_latency_and_bandwidth_of_each_algorithm_are_those_of_the_tuner_within_one_percent(
    name: str, op: str, algorithm: str, protocol: str, latency: float, rate: float
) -> None:
    choice = {(each.algorithm, each.protocol): each for each in choices(op, GIB, SYSTEMS[name])}[
        algorithm, protocol
    ]
    assert choice.latency_us == pytest.approx(latency, rel=0.01)
    assert choice.gigabytes_per_s == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [("all_reduce", "tree"), ("all_reduce", "nvls_tree"), ("all_gather", "pat")],
)
def test_trees_are_as_deep_as_the_whole_logarithm_of_their_nodes(
    op: str, algorithm: Algorithm
) -> None:
    """Published rows are of 2, 4, 8 … nodes, whose logarithm is whole anyway. For 6 and 7 nodes the
    logarithm is that of 4."""
    per_node = 1 if algorithm == "pat" else 8

    def latency(nodes: int) -> float:
        microseconds = latency_us(
            op, algorithm, "Simple",
            system("hopper", num_ranks=per_node * nodes, num_nodes=nodes, rails=NDR),
        )
        return microseconds - (2.8 * nodes if algorithm == "pat" else 0.0)

    assert latency(3) == pytest.approx(latency(2))
    assert latency(4) == pytest.approx(latency(6)) == pytest.approx(latency(7))
    assert latency(4) - latency(2) == pytest.approx(latency(8) - latency(4))
    assert latency(4) > latency(2)


MODEL_BUS = [
    ("8 H100", "all_reduce", 8 * GIB, 475.6), ("8 H100", "all_reduce", GIB, 473),
    ("8 H100", "all_reduce", 16 * GIB, 475.8),
    ("8 H100 without NVLS", "all_reduce", 16 * GIB, 359.8),
    ("8 H100", "all_gather", 16 * GIB, 359.5), ("8 A100", "all_reduce", GIB, 238.3),
    ("8 A100", "all_reduce", 8 * GIB, 239.8), ("8 B200", "all_reduce", 8 * GIB, 827.7),
    ("2 x 4 A100, 4 HDR", "all_reduce", 8 * GIB, 95.8),
    ("3 x 8 A100, 4 HDR", "all_reduce", GIB, 94.1),
    ("2 x 8 A100, 4 HDR", "all_reduce", 4 * GIB, 95.7), ("8 x 8 H100", "all_reduce", GIB // 2, 342),
    ("8 x 8 H100", "all_reduce", 8 * GIB, 359), ("32 x 8 H100", "all_reduce", 2 * GIB, 353),
    ("32 x 8 H100", "all_gather", 2 * GIB, 299),
    ("2 x 8 H100, 8 x 200G", "all_reduce", 8 * GIB, 383), ("2 x p4d", "all_reduce", GIB, 47.7),
    ("4 x p4d", "all_reduce", GIB, 47.3), ("72 B200", "all_reduce", GIB // 2, 898),
    ("72 B200", "all_reduce", GIB, 908), ("72 B200", "all_reduce", 8 * GIB, 916),
]
"""The model's column of the published check.

Two rows are left out, since the description leaves them open. One is 93.5 of 2 x 4 A100 at "0.5
GB", which these formulas give at 0.25 GiB (94.9 at 0.5). The other is 351 of 8 x 200G: a NIC
counted at 22 GB/s, not the 24 of the same column.
"""


@pytest.mark.parametrize(("name", "op", "nbytes", "bus"), MODEL_BUS)
def test_the_bus_bandwidth_of_the_choice_is_the_model_s_within_one_percent(
    name: str, op: str, nbytes: int, bus: float
) -> None:
    asked = SYSTEMS[name]
    choice = choose(op, nbytes, asked)
    assert nbytes / choice.time_us / 1000 * bus_factor(op, asked.num_ranks) == pytest.approx(
        bus, rel=0.01
    )


@pytest.mark.parametrize(("name", "times"), [
    ("8 A100", (44, 93, 277, 1011, 3947)), ("8 H100", (37, 72, 195, 685, 2642)),
    ("8 B200", (24, 50, 114, 358, 1337)), ("2 x 8 H100", (58, 98, 245, 769, 2866)),
    ("8 x 8 H100", (162, 205, 373, 1031, 3233)),
])
def test_all_gathers_from_4_to_1024_mebibytes_take_what_the_table_says(
    name: str, times: tuple[int, ...]
) -> None:
    predicted = [
        choose("all_gather", size * MIB, SYSTEMS[name]).time_us for size in (4, 16, 64, 256, 1024)
    ]
    assert predicted == pytest.approx(times, abs=0.55)


def test_a_channel_between_h100_nodes_is_45_since_eight_of_48_do_not_fit_nvlink() -> None:
    assert between_nodes("hopper", NDR) == Graph(channels=8, intra=45, inter=45)
    assert between_nodes("blackwell", NDR) == Graph(channels=8, intra=48, inter=48)
    assert between_nodes("ampere", HDR) == Graph(channels=8, intra=24, inter=24)
    assert between_nodes("ampere", Rails(count=4, line_gb_s=12.5)) == Graph(
        channels=4, intra=12, inter=12
    )


@pytest.mark.parametrize(("line", "count"), [(10, 8), (10, 1), (36, 8), (40, 4)])
def test_a_ring_that_fits_nvlink_has_what_its_nic_counts_for_whatever_speeds_the_search_tries(
    line: float, count: int
) -> None:
    """Four percent off the line (topo.h): 8 of 9.6 GB/s are a fifth of NVLink, so no even part of
    it is looked for."""
    assert between_nodes("hopper", Rails(count=count, line_gb_s=line)) == Graph(
        channels=count, intra=0.96 * line, inter=0.96 * line
    )


def test_all_gather_and_reduce_scatter_never_run_on_trees_or_in_the_switch() -> None:
    for asked in SYSTEMS.values():
        for op in ("all_gather", "reduce_scatter"):
            assert {each.algorithm for each in choices(op, GIB, asked)} == {"ring"}


def test_with_one_gpu_per_node_pat_is_offered_and_wins_where_latency_counts() -> None:
    lonely = system("hopper", num_ranks=64, num_nodes=64, rails=Rails(count=1, line_gb_s=50))
    assert {each.algorithm for each in choices("all_gather", MIB, lonely)} == {"ring", "pat"}
    assert choose("all_gather", 8 * MIB, lonely).algorithm == "pat"
    assert choose("all_gather", 8 * GIB, lonely).algorithm == "ring"


def test_small_messages_take_LL_middle_ones_LL128_and_large_ones_Simple() -> None:
    protocols = [
        choose("all_gather", size, SYSTEMS["8 H100"]).protocol for size in (2**16, 8 * MIB, GIB)
    ]
    assert protocols == ["LL", "LL128", "Simple"]


def test_all_reduce_picks_nvls_in_a_hopper_node_trees_between_them_and_rings_on_a100() -> None:
    assert choose("all_reduce", GIB, SYSTEMS["8 H100"]).algorithm == "nvls"
    assert choose("all_reduce", 2**10, SYSTEMS["8 x 8 H100"]).algorithm == "tree"
    assert choose("all_reduce", GIB, SYSTEMS["8 x 8 H100"]).algorithm == "nvls_tree"
    assert choose("all_reduce", GIB, SYSTEMS["8 A100"]).algorithm == "ring"


def test_four_h200_reduce_on_a_ring_although_their_switch_could() -> None:
    assert choose("all_reduce", 8 * GIB, system("hopper", num_ranks=4)).algorithm == "ring"
    assert choose("all_reduce", 8 * GIB, system("hopper", num_ranks=5)).algorithm == "nvls"
    assert choose("all_reduce", 8 * GIB, system("blackwell", num_ranks=5)).algorithm == "ring"


@given(
    generation=st.sampled_from(GENERATIONS), nodes=st.integers(1, 64),
    per_node=st.sampled_from([1, 2, 4, 8]),
    op=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    nbytes=st.integers(1, 2**34),
)
def test_every_choice_takes_time_and_the_tuner_takes_the_shortest(
    generation, nodes: int, per_node: int, op: str, nbytes: int
) -> None:
    if nodes * per_node == 1:
        return
    asked = system(generation, num_ranks=nodes * per_node, num_nodes=nodes, rails=NDR)
    offered = list(choices(op, nbytes, asked))
    assert all(each.latency_us > 0 and each.gigabytes_per_s > 0 for each in offered)
    assert choose(op, nbytes, asked).time_us == min(each.time_us for each in offered)


def test_an_unknown_collective_is_an_error() -> None:
    with pytest.raises(KeyError):
        choose("gather", 8, SYSTEMS["8 A100"])
