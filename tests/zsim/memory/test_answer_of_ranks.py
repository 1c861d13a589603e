"""The verdict is about the rank that may need most, with its place in its node and its own
Program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.cluster.cluster_presets import load_cluster
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Op
from zsim.ir.program import Program, RankProgram
from zsim.memory.allocator import reserved
from zsim.memory.fits import STEPS, assess_program
from zsim.memory.holdings import holdings
from zsim.memory.non_torch import cublas_workspace, outside, total
from zsim.scenario import plan
from zsim.scenario.scenario import Scenario, parse

MIB = 2**20


def scenario(strategy: str, *, nodes: int = 1) -> Scenario:
    text = f"""
model = {{ preset = "gpt-2-124m" }}
batch = {{ micro_batch = 1, sequence_length = 128 }}
cluster = {{ preset = "dgx-a100", nodes = {nodes} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""
    return parse(text.encode(), where="ranks.toml")


def most_needed(program: Program, case: Scenario, rank: int) -> int:
    """The most that `rank` may need: what the allocator reserves for its Program, and what lies
    outside at its place."""
    rank_program = program.of_rank(rank)
    records = reserved.replay(
        rank_program, workspace_bytes=cublas_workspace(case.cluster.device), empty_cache="first"
    )
    return (
        max(records[phase].peak_reserved_bytes for phase in STEPS)
        + total(outside(program, case.cluster, rank=rank)).high
    )


@pytest.mark.parametrize(("strategy", "nodes"), [
    ('name = "ddp"', 1), ('name = "ddp"', 3), ('name = "fsdp2"', 1), ('name = "zero2"', 2),
    ('name = "zero_redundancy"', 1),
])
def test_no_rank_may_need_more_than_the_one_that_is_told_of(strategy: str, nodes: int) -> None:
    """A rank of A100s inside the chain of its node has more of NCCL's buffers than the first and
    the last."""
    case = scenario(strategy, nodes=nodes)
    program = plan.plan(case, device="cuda")
    verdict = assess_program(program, case.cluster)
    needed = [most_needed(program, case, rank) for rank in range(program.mesh.world_size)]
    assert verdict.needed.high == needed[verdict.rank] == max(needed)
    assert verdict.rank == needed.index(max(needed))


def test_what_just_fits_the_first_rank_does_not_surely_fit_its_neighbours() -> None:
    case = scenario('name = "ddp"')
    program = plan.plan(case, device="cuda")
    verdict = assess_program(program, case.cluster)
    assert verdict.rank == 1
    assert replace(
        verdict, capacity=replace(verdict.capacity, low=most_needed(program, case, 0))
    ).verdict == ("TIGHT")


def _rank(*sizes: int, streams: tuple[str, ...] = ("compute",)) -> RankProgram:
    """Buffers made and freed one after the other, each on its stream in turn."""
    ops = tuple(
        Op(
            index=index,
            kind="copy",
            unit="root",
            stream=streams[index % len(streams)],  # type: ignore[arg-type]
            memory=(Alloc("x", "temporaries", size), Free("x")),
        )
        for index, size in enumerate(sizes)
    )
    return RankProgram(construction=(), first=ops, steady=ops)


def test_what_the_allocator_keeps_counts_as_well_as_what_lives() -> None:
    """The second rank's peak is lower, but its two streams cannot use each other's segments."""
    first, two = _rank(50 * MIB), _rank(40 * MIB, 40 * MIB, streams=("compute", "all_gather"))
    program = Program(mesh=Mesh(dp_replicate=2), ranks=(first, two), assignment=(0, 1))
    verdict = assess_program(program, load_cluster("dgx-h100", ranks=2))
    held = (verdict.allocated_bytes, verdict.reserved_bytes)
    assert (verdict.rank, *held) == (1, 40 * MIB, 80 * MIB)


@pytest.mark.parametrize("cluster", ["cpu-gloo", "dgx-h100"])
def test_of_ranks_that_need_as_much_the_first_is_told_of(cluster: str) -> None:
    program = Program(
        mesh=Mesh(dp_replicate=3), ranks=(_rank(MIB), _rank(5 * MIB), _rank(5 * MIB)),
        assignment=(0, 1, 2),
    )
    assert assess_program(program, load_cluster(cluster, ranks=3)).rank == 1


def test_what_lives_at_the_peak_is_told_largest_first() -> None:
    sizes = {"a": 10, "b": 300, "c": 20, "d": 200}
    steady = tuple(
        Op(index, "forward", unit, "compute", memory=(Alloc(name, "activations", size),))
        for index, ((name, size), unit) in enumerate(zip(sizes.items(), "pqrs", strict=True))
    )
    held = holdings(RankProgram(construction=(), first=(), steady=steady), "steady")
    assert [(each.unit, each.nbytes) for each in held] == [
        ("q", 300), ("s", 200), ("r", 20), ("p", 10)
    ]
