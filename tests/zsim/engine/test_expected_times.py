"""Times that torch's own tests of overlap expect, as equations in nanoseconds.

torch has them commented out, because sleeping kernels are not exact in its CI, and asserts that
overlap is faster than none. Blocks are equal and the root takes no time. The table of all
expectations is tests/torch_expectations.md.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.programs.timelines import Row, Toy, over, timeline, training
from zsim.ir.ops import Op
from zsim.strategies import fsdp1, fsdp2

times = st.integers(1, 10_000)
numbers = st.integers(2, 5)


def of_fsdp2(toy: Toy, *, blocks: int, compute: int, root_too: bool = False) -> list[Row]:
    """The timeline of blocks that are resharded after forward, whose backward takes twice their
    forward. torch's root has no parameters; ours is gathered once, unless `root_too`."""
    case = training(blocks, forward=compute, backward=2 * compute)
    options = fsdp2.Options(reshard_after_forward=True if root_too else "auto")
    return timeline(fsdp2.plan(case, mesh=over(dp_shard=2), options=options), toy)


def of_fsdp1(toy: Toy, *, blocks: int, compute: int) -> list[Row]:
    """The timeline of FSDP1 whose host runs ahead of the device as far as it likes."""
    case = training(blocks, forward=compute, backward=2 * compute)
    options = fsdp1.Options(limit_all_gathers=False)
    return timeline(fsdp1.plan(case, mesh=over(dp_shard=2), options=options), toy)


def communication(ns: int) -> dict[str, int]:
    """Each collective takes `ns`."""
    return {"all_gather": ns, "reduce_scatter": ns}


def end(rows: list[Row], kind: str = "") -> int:
    """The end of the last op of `kind`, or of all."""
    return max(row[2] for row in rows if row[0].startswith(kind))


@settings(max_examples=20, deadline=None)
@given(numbers, times, times)
def test_forward_exposes_one_all_gather_and_then_only_what_is_longer(
    blocks: int, compute: int, gather: int
) -> None:
    """test_fully_shard_overlap.py, forward: one all-gather and all compute where compute is longer,
    never more than one after the other."""
    forward = end(
        of_fsdp2(Toy(collectives=communication(gather)), blocks=blocks, compute=compute), "forward"
    )
    assert forward == gather + (blocks - 1) * max(gather, compute) + compute
    assert forward <= blocks * (gather + compute)
    if gather <= compute:
        assert forward == gather + blocks * compute


@settings(max_examples=20, deadline=None)
@given(numbers, times, st.integers(1, 100))
def test_backward_exposes_one_all_gather_and_one_reduce_scatter(
    blocks: int, collective: int, percent: int
) -> None:
    """test_fully_shard_overlap.py, backward: two collectives and twice forward's compute. The host
    begins it when forward is over on the device, as torch's formula has it."""
    compute = -(-collective * 100 // percent)
    forward = collective + blocks * compute

    def waiting(op: Op) -> int:
        return forward if (op.kind, op.stream) == ("alloc", "compute") else 0

    toy = Toy(collectives=communication(collective), issue=waiting)
    rows = of_fsdp2(toy, blocks=blocks, compute=compute)
    assert end(rows, "forward") == forward
    assert end(rows) - forward == 2 * collective + 2 * blocks * compute


@settings(max_examples=20, deadline=None)
@given(numbers, times, st.integers(1, 100), st.booleans())
def test_a_host_that_runs_ahead_hides_the_first_all_gather_of_backward_too(
    blocks: int, collective: int, percent: int, root_too: bool
) -> None:
    """test_fully_shard_overlap.py, forward and backward: one collective less than torch's bound,
    since the last block is gathered again while it runs. With a root to be gathered before it, the
    bound is attained."""
    compute = -(-collective * 100 // percent)
    toy = Toy(collectives=communication(collective))
    rows = of_fsdp2(toy, blocks=blocks, compute=compute, root_too=root_too)
    assert end(rows) == (3 if root_too else 2) * collective + 3 * blocks * compute
    assert end(rows) < 3 * blocks * (collective + compute)


@pytest.mark.parametrize(("root_too", "step"), [(False, 245), (True, 255)])
def test_torchs_own_numbers_are_met_to_the_nanosecond(root_too: bool, step: int) -> None:
    """test_fully_shard_overlap.py: three blocks of 25 ms, collectives of 10 ms."""
    ms = 1_000_000
    toy = Toy(collectives=communication(10 * ms))
    rows = of_fsdp2(toy, blocks=3, compute=25 * ms, root_too=root_too)
    assert (end(rows, "forward"), end(rows)) == (85 * ms, step * ms)


@pytest.mark.parametrize(("compute", "gather", "total"), [
    (0, 0, 0), (0, 100, 400), (100, 0, 400), (100, 100, 500)
])
def test_fsdp1_with_both_takes_one_all_gather_more_than_compute_alone(
    compute: int, gather: int, total: int
) -> None:
    """fsdp/test_fsdp_overlap.py, forward overlap of two ranks: nothing, all-gathers alone, compute
    alone, and both, whose sum is more than 1.1 times what they take together."""
    case = training(4, forward=compute, backward=compute)
    options = fsdp1.Options(limit_all_gathers=False, sharding="grad_op")
    rows = timeline(
        fsdp1.plan(case, mesh=over(dp_shard=2), options=options),
        Toy(collectives={"all_gather": gather, "reduce_scatter": 0}),
    )
    ends = [row[2] for row in rows if row[0].startswith(("forward", "all_gather"))]
    assert max(ends, default=0) == total
    assert 4 * gather + 4 * compute > 1.1 * total or not (gather and compute)


@settings(max_examples=20, deadline=None)
@given(numbers, times, times)
def test_fsdp1_forward_takes_what_that_of_fsdp2_takes(
    blocks: int, compute: int, gather: int
) -> None:
    """fsdp/test_fsdp_overlap.py, forward overlap, for any times."""
    rows = of_fsdp1(Toy(collectives=communication(gather)), blocks=blocks, compute=compute)
    assert end(rows, "forward") == gather + (blocks - 1) * max(gather, compute) + compute


@settings(max_examples=20, deadline=None)
@given(numbers, times, times)
def test_one_rank_never_gathers(blocks: int, compute: int, gather: int) -> None:
    """fsdp/test_fsdp_overlap.py, a world of one: all-gathers never happen, so they cost nothing."""
    case = training(blocks, forward=compute, backward=compute)
    rows = timeline(
        fsdp2.plan(case, mesh=over(), options=fsdp2.Options()),
        Toy(collectives=communication(gather)),
    )
    assert end(rows, "forward") == blocks * compute
    assert {row[0].split()[0] for row in rows} <= {"forward", "backward"}
