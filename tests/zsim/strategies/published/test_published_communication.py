"""Claims of the texts on ZeRO and FSDP about bytes sent per rank and step, line by line, with
rings.

Programs are those of a small transformer with f = 2. Where a published figure is wrong, the
docstring names it.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.closed_forms import bytes_sent_per_step
from tests.support.programs.small_programs import ddp_bytes, parameter_bytes, sent, small_training
from zsim.cluster.collectives import ring
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.strategies import fsdp2, hsdp, zero1, zero2, zero3

GB = 10**9


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("n", [2, 3, 8, 1024])
def test_c1_all_gather_and_reduce_scatter_send_all_but_one_part_in_n_minus_1_steps(
    op: str, n: int
) -> None:
    message = 5 * n
    assert ring.bytes_sent(op, message, group_size=n) == message * (n - 1) // n
    assert [{send.nbytes for send in step} for step in ring.steps(op, message, group_size=n)] == [
        {5}
    ] * (n - 1)


@pytest.mark.parametrize("n", [2, 3, 8, 1024])
def test_c2_all_reduce_sends_twice_that_in_twice_the_steps(n: int) -> None:
    message = 5 * n
    assert ring.bytes_sent("all_reduce", message, group_size=n) == 2 * message * (n - 1) // n
    assert ring.num_steps("all_reduce", message, group_size=n) == 2 * (n - 1)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_c3_ddp_sends_two_parts_in_n(n: int) -> None:
    training = small_training()
    nbytes = parameter_bytes(training)
    assert (
        ddp_bytes(training, n)
        == 2 * nbytes * (n - 1) // n
        == bytes_sent_per_step(nbytes, scheme="ddp", num_ranks=n)
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_c4_zero1_with_all_reduce_sends_half_as_much_again_as_ddp(n: int) -> None:
    training = small_training()
    program = zero1.plan(training, mesh=Mesh(dp_shard=n), options=zero1.Options(form="all_reduce"))
    assert (
        sent(program)
        == 3 * parameter_bytes(training) * (n - 1) // n
        == ddp_bytes(training, n) * 3 // 2
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_c5_zero1_with_reduce_scatter_sends_as_much_as_ddp(n: int) -> None:
    training = small_training()
    program = zero1.plan(
        training, mesh=Mesh(dp_shard=n), options=zero1.Options(form="reduce_scatter")
    )
    assert sent(program) == ddp_bytes(training, n)
    assert sent(program) == 2 * parameter_bytes(training) * (n - 1) // n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_c6_zero2_sends_as_much_as_ddp(n: int) -> None:
    training = small_training()
    program = zero2.plan(training, mesh=Mesh(dp_shard=n), options=zero2.Options())
    assert sent(program) == ddp_bytes(training, n)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_c7_zero3_sends_half_as_much_again_as_ddp(n: int, lookahead: int) -> None:
    training = small_training()
    program = zero3.plan(
        training, mesh=Mesh(dp_shard=n), options=zero3.Options(lookahead=lookahead)
    )
    assert sent(program) == 3 * parameter_bytes(training) * (n - 1) // n
    assert sent(program) == bytes_sent_per_step(
        parameter_bytes(training), scheme="zero3", num_ranks=n
    )


@pytest.mark.parametrize("n", [2, 4, 8])
def test_c7_fsdp2_that_reshards_every_unit_sends_what_zero3_sends(n: int) -> None:
    training = small_training()
    program = fsdp2.plan(
        training, mesh=Mesh(dp_shard=n), options=fsdp2.Options(reshard_after_forward=True)
    )
    assert sent(program) == 3 * parameter_bytes(training) * (n - 1) // n


@pytest.mark.parametrize("n", [2, 4])
def test_c8_zero3_with_checkpointing_sends_at_most_one_more_all_gather(n: int) -> None:
    """4 messages where recomputation gathers for itself; here it shares the all-gather of its
    backward, so it stays at 3."""
    training = small_training(checkpointing=Checkpointing(mode="full"))
    program = zero3.plan(training, mesh=Mesh(dp_shard=n), options=zero3.Options())
    assert any(op.kind == "recompute" for op in program.ranks[0].steady)
    assert sent(program) == 3 * parameter_bytes(training) * (n - 1) // n
    assert sent(program) <= 4 * parameter_bytes(training) * (n - 1) // n


@pytest.mark.parametrize(("replicas", "in_node"), [(2, 4), (4, 8), (2, 2)])
def test_c9_hsdp_shards_inside_the_node_and_all_reduces_a_shard_between_nodes(
    replicas: int, in_node: int
) -> None:
    training = small_training()
    mesh = Mesh(dp_replicate=replicas, dp_shard=in_node)
    program = hsdp.plan(training, mesh=mesh, options=hsdp.Options(reshard_after_forward=True))
    nbytes = parameter_bytes(training)
    assert sent(program, "dp_shard") == 3 * nbytes * (in_node - 1) // in_node
    assert sent(program, "dp_replicate") == 2 * (nbytes // in_node) * (replicas - 1) // replicas


def test_c10_four_ranks_with_a_gigabyte_each_gather_in_three_steps() -> None:
    steps = list(ring.steps("all_gather", 4 * GB, group_size=4))
    out, into = Counter[int](), Counter[int]()
    for send in (send for step in steps for send in step):
        out[send.source] += send.nbytes
        into[send.destination] += send.nbytes
    assert len(steps) == 3
    assert out == into == dict.fromkeys(range(4), 3 * GB)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_c11_hybrid_stages_gather_large_units_twice_and_small_ones_once(
    n: int, accumulation: int
) -> None:
    """3fΨ_L + 2fΨ_S, of ZeRO-3 for large units and ZeRO-2 for small ones.

    The published 6Ψ_L + 2Ψ_S, with f = 2, forgets that small units' parameters are all-gathered
    after the step. Further micro-batches add 3fΨ_L + fΨ_S each.
    """
    training = small_training(accumulation=accumulation)
    sizes = {unit.fqn: 2 * unit.numel for unit in training.model.units}
    small = sizes.pop("root")
    large = sum(sizes.values())
    options = zero3.Options(zero2_threshold=small // 2)
    program = zero3.plan(training, mesh=Mesh(dp_shard=n), options=options)
    each = 3 * large + small
    assert sent(program) == (each * accumulation + small) * (n - 1) // n
    if accumulation == 1:
        assert sent(program) == (3 * large + 2 * small) * (n - 1) // n
        whole = zero3.plan(
            training, mesh=Mesh(dp_shard=n), options=zero3.Options(zero2_threshold=large)
        )
        assert sent(whole) == ddp_bytes(training, n)
