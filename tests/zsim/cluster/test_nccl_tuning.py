"""NCCL's cost model against its published figures: latency and bandwidth by hand."""

from __future__ import annotations

import pytest

from zsim.cluster.collectives.nccl.durations import factor
from zsim.cluster.collectives.nccl.tuner import (
    Algorithm,
    Graph,
    Protocol,
    System,
    latency_us,
    ring_bus_gb_s,
)
from zsim.cluster.links import Generation, Processor


def system(
    generation: Generation, *, rings: int, gb_s: float, nodes: int = 1, per_node: int = 8,
    processor: Processor = "intel",
) -> System:
    """Full nodes with so many rings of `gb_s` each."""
    return System(
        generation=generation, num_ranks=nodes * per_node, num_nodes=nodes, per_node=per_node,
        ring=Graph(channels=rings, gb_s=gb_s), processor=processor,
    )


SYSTEMS: dict[str, System] = {
    "8 V100": system("volta", rings=6, gb_s=20), "8 A100": system("ampere", rings=12, gb_s=20),
    "8 H100": system("hopper", rings=12, gb_s=30),
    "8 B200": system("blackwell", rings=16, gb_s=45),
    "2 x 8 A100": system("ampere", rings=8, gb_s=24, nodes=2, processor="amd"),
    "2 x 8 H100": system("hopper", rings=8, gb_s=45, nodes=2),
    "8 x 8 H100": system("hopper", rings=8, gb_s=45, nodes=8),
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
    ("8 H100", "all_reduce", "nvls", "Simple", 25, None),
    ("8 H100", "all_reduce", "ring", "Simple", 56, 205.7),
    ("8 H100", "all_gather", "ring", "Simple", 32.2, 411.4),
    ("8 H100", "all_gather", "ring", "LL128", 27.3, 378.5),
    ("8 H100", "all_gather", "ring", "LL", 10.8, 161.1),
    ("8 B200", "all_reduce", "nvls", "Simple", 25, None),
    ("8 B200", "all_reduce", "ring", "Simple", 56, 411.4),
    ("8 B200", "all_gather", "ring", "Simple", 32.2, 822.9),
    ("8 B200", "all_gather", "ring", "LL128", 27.3, 731.4),
    ("8 B200", "all_gather", "ring", "LL", 10.8, 322.3),
    ("2 x 8 A100", "all_reduce", "ring", "Simple", 204.4, 102.4),
    ("2 x 8 A100", "all_gather", "ring", "Simple", 106.4, 204.8),
    ("2 x 8 A100", "all_gather", "ring", "LL128", 46, 170.7),
    ("2 x 8 A100", "all_gather", "ring", "LL", 37.3, 24),
    ("2 x 8 H100", "all_reduce", "nvls_tree", "Simple", 66.8, None),
    ("2 x 8 H100", "all_gather", "ring", "Simple", 70, 384),
    ("2 x 8 H100", "all_gather", "ring", "LL128", 44.6, 313.2),
    ("2 x 8 H100", "all_gather", "ring", "LL", 23.3, 41.6),
    ("8 x 8 H100", "all_reduce", "nvls_tree", "Simple", 150.4, None),
    ("8 x 8 H100", "all_gather", "ring", "Simple", 296.8, 365.7),
    ("8 x 8 H100", "all_gather", "ring", "LL128", 148.4, 298.3),
    ("8 x 8 H100", "all_gather", "ring", "LL", 81.5, 20.7),
]


@pytest.mark.parametrize(
    ("name", "op", "algorithm", "protocol", "latency", "rate"), LATENCY_AND_BANDWIDTH
)
def test_latency_and_bandwidth_of_each_algorithm_are_those_of_the_tuner_within_one_percent(
    name: str, op: str, algorithm: Algorithm, protocol: Protocol, latency: float, rate: float | None
) -> None:
    """GB/s of the message; those of the switch are `zsim.cluster.collectives.nccl.durations`'s."""
    asked = SYSTEMS[name]
    assert latency_us(op, algorithm, protocol, asked) == pytest.approx(latency, rel=0.01)
    if rate:
        reached = ring_bus_gb_s(protocol, asked) / factor(op, asked.num_ranks)
        assert reached == pytest.approx(rate, rel=0.01)


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
            system("hopper", rings=8, gb_s=45, nodes=nodes, per_node=per_node),
        )
        return microseconds - (2.8 * nodes if algorithm == "pat" else 0.0)

    assert latency(3) == pytest.approx(latency(2))
    assert latency(4) == pytest.approx(latency(6)) == pytest.approx(latency(7))
    assert latency(4) - latency(2) == pytest.approx(latency(8) - latency(4))
    assert latency(4) > latency(2)
