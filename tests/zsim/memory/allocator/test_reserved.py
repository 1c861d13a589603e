"""Programs in the caching allocator: their pools, their peaks, what cuBLAS takes, and laws on the
Programs of all strategies."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zsim
from tests.support.cases.micro_batch_cases import with_micro_batches
from tests.support.cases.sampling import WHOLE
from zsim.errors import ProgramError
from zsim.ir import ledger_replay as memory
from zsim.ir.ops import Alloc, DriverCalls, Free, Kernel, MemoryEvent, Op, OpKind, Stream
from zsim.ir.program import RankProgram, begin_alike
from zsim.memory.allocator.caching_allocator import (
    SMALL_SEGMENT,
    CachingAllocator,
    DeviceFullError,
)
from zsim.memory.allocator.heap import Heap
from zsim.memory.allocator.reserved import (
    AllocatorRecord,
    built_elsewhere,
    replay,
    replay_each,
    replay_phase,
)
from zsim.memory.allocator.snapshot import snapshot
from zsim.memory.equal_micro_batches import micro_batches
from zsim.scenario.plan import plan
from zsim.testing.strategies import scenarios

MIB = 2**20


def op(
    index: int, *events: MemoryEvent, stream: Stream = "compute", kind: OpKind = "forward",
    flops: int = 0,
) -> Op:
    kernels = (Kernel("linear", flops, 0, "float32"),) if flops else ()
    return Op(index=index, kind=kind, unit="a", stream=stream, memory=events, kernels=kernels)


def program(
    *steady: Op, construction: tuple[Op, ...] = (), first: tuple[Op, ...] = ()
) -> RankProgram:
    return RankProgram(construction=construction, first=first, steady=steady)


def activations(name: str, nbytes: int) -> Alloc:
    return Alloc(name, "activations", nbytes)


def test_a_record_says_what_is_reserved_what_lives_and_what_rounding_costs():
    rank = program(
        op(0, activations("x", 4 * MIB), activations("y", 5)),
        op(1, Free("x"), activations("z", 12 * MIB)), op(2, Free("z"), Free("y")),
        construction=(op(0, Alloc("p", "parameters", 100), stream="host", kind="alloc"),),
    )
    records = replay(rank)
    assert records["construction"] == AllocatorRecord(
        peak_reserved_bytes=2 * MIB, end_reserved_bytes=2 * MIB, peak_active_bytes=512,
        rounding_bytes=412, workspace_bytes=0, num_segments=1, num_releases=0,
        reserved_by_pool={"compute small": 2 * MIB},
    )
    assert records["steady"] == AllocatorRecord(
        peak_reserved_bytes=22 * MIB, end_reserved_bytes=22 * MIB,
        peak_active_bytes=12 * MIB + 1024, rounding_bytes=412 + 507, workspace_bytes=0,
        num_segments=2, num_releases=0,
        reserved_by_pool={"compute small": 2 * MIB, "compute large": 20 * MIB},
    )


def test_a_buffer_lives_in_the_pool_of_the_stream_of_the_op_that_makes_it_and_the_hosts_in_that_of_compute():  # noqa: E501
    rank = program(
        op(0, activations("x", 3 * MIB), stream="all_gather_copy_in"),
        op(1, activations("y", 3 * MIB), stream="host"), op(2, Free("x"), Free("y")),
        op(3, activations("z", 6 * MIB), activations("w", 6 * MIB)),
        op(4, Free("z"), Free("w")),
    )
    assert replay(rank)["steady"].reserved_by_pool == {
        "all_gather_copy_in large": 20 * MIB, "compute large": 20 * MIB
    }


def test_the_next_step_reuses_what_the_first_reserved():
    step = (op(0, activations("x", 30 * MIB)), op(1, Free("x")))
    records = replay(program(*step, first=step))
    assert [records[phase].end_reserved_bytes for phase in ("construction", "first", "steady")] == [
        0, 30 * MIB, 30 * MIB,
    ]


def test_a_buffer_of_no_bytes_takes_no_memory():
    rank = program(op(0, activations("x", 0)), op(1, Free("x")))
    assert (replay(rank)["steady"].peak_reserved_bytes, replay(rank)["steady"].num_segments) == (
        0, 0,
    )


def test_cublas_takes_a_workspace_at_the_first_products_of_the_forward_and_of_the_backward_and_keeps_both():  # noqa: E501
    step = (
        op(0, flops=0), op(1, flops=9), op(2, flops=9), op(3, kind="backward", flops=9),
        op(4, kind="recompute", flops=9), op(5, kind="optimizer", flops=9),
    )
    records = replay(program(*step, first=step), workspace_bytes=32 * MIB)
    assert [
        (records[phase].peak_active_bytes, records[phase].peak_reserved_bytes)
        for phase in ("first", "steady")
    ] == [(64 * MIB, 64 * MIB)] * 2


def test_what_is_recomputed_runs_in_autograds_thread_whose_workspace_it_takes_when_it_is_the_first_there():  # noqa: E501
    records = replay(
        program(op(0, flops=9), op(1, kind="recompute", flops=9)), workspace_bytes=32 * MIB
    )
    assert (records["steady"].peak_active_bytes, records["steady"].workspace_bytes) == (
        64 * MIB, 64 * MIB,
    )


def test_workspaces_are_counted_when_active_bytes_are_at_their_peak():
    step = (
        op(0, activations("x", 80 * MIB), flops=9), op(1, Free("x")),
        op(2, kind="backward", flops=9),
    )
    records = replay(program(*step, first=step), workspace_bytes=32 * MIB)
    assert [records[phase].workspace_bytes for phase in ("first", "steady")] == [32 * MIB, 64 * MIB]


@pytest.mark.parametrize("blocks", [2, 8, 32])
def test_contiguous_inputs_of_checkpoints_leave_no_fragments(blocks: int) -> None:
    """M_D of ZeRO-R. A block's output, the next checkpoint, goes into the hole that the block's own
    activations leave. They do not fit into the rest of it, where two more outputs go. Preallocated,
    all outputs lie in one piece, and the hole serves each block again."""
    output, inside = 12 * MIB, 40 * MIB
    apart = program(*(
        op(i, activations(f"in.{i}", inside), Free(f"in.{i}"), activations(f"out.{i}", output))
        for i in range(blocks)
    ), op(blocks, *(Free(f"out.{i}") for i in range(blocks))))
    contiguous = program(*(
        op(i, activations(f"in.{i}", inside), Free(f"in.{i}")) for i in range(blocks)
    ), construction=(op(0, activations("outs", blocks * output), kind="alloc"),))
    scattered, dense = replay(apart)["steady"], replay(contiguous)["steady"]
    holes = 1 + -(-(blocks - 1) // 3)
    assert scattered.peak_reserved_bytes == holes * inside
    assert dense.peak_reserved_bytes == blocks * output + inside


def test_a_model_that_is_built_elsewhere_leaves_on_the_device_what_outlives_construction():
    made = (
        op(
            0, Alloc("whole", "parameters", 400), Alloc("p", "parameters", 100), stream="host",
            kind="alloc",
        ),
        op(1, Free("whole"), Alloc("whole", "parameters", 50)),
        op(2, Alloc("moment", "temporaries", 7), Free("moment")),
    )
    rank = program(op(0, Free("p")), construction=made)
    moved = built_elsewhere(rank)
    assert [made.memory for made in moved.construction] == [
        (Alloc("p", "parameters", 100),), (Alloc("whole", "parameters", 50),), ()
    ]
    assert (moved.first, moved.steady) == (rank.first, rank.steady)


def test_an_emptied_cache_does_not_carry_what_construction_needed_into_the_steps():
    construction = (
        op(0, Alloc("whole", "parameters", 40 * MIB), stream="host", kind="alloc"),
        op(1, Free("whole")),
    )
    rank = program(op(0, activations("x", 30 * MIB), Free("x")), construction=construction)
    kept, emptied = replay(rank), replay(rank, empty_cache="first")
    assert kept["steady"].end_reserved_bytes == 40 * MIB
    assert (emptied["construction"].end_reserved_bytes, emptied["steady"].end_reserved_bytes) == (
        40 * MIB, 30 * MIB,
    )
    late = replay(rank, empty_cache="steady")
    assert [late[phase].end_reserved_bytes for phase in ("first", "steady")] == [40 * MIB, 30 * MIB]


HSDP, FSDP1 = {"name": "hsdp", "dp_shard": 8}, {"name": "fsdp1"}


@pytest.mark.parametrize(("strategy", "micro_batches", "grows"), [
    (HSDP, 1, True), (FSDP1, 1, True), (HSDP, 3, False), (FSDP1, 3, False),
])
def test_no_later_step_reserves_more_than_is_told(
    strategy: dict[str, object], micro_batches: int, grows: bool
) -> None:
    """The first of several micro-batches reserves what the step lacks. The next step is followed
    until one finds what it found before."""
    scenario = zsim.Scenario(
        model={"preset": "llama-3-8b"},
        batch={"micro_batch": 1, "sequence_length": 4096, "accumulation": micro_batches},
        cluster={"preset": "dgx-h100", "nodes": 2}, strategy=strategy,
        precision={"parameters": "bf16", "reduce": "fp32"},
    )
    rank, heap = plan(scenario, device="cuda").of_rank(0), Heap(CachingAllocator())
    for ops in (rank.construction, rank.first, rank.second):
        replay_phase(heap, ops, "first")
    steps, told = (
        [replay_phase(heap, rank.steady, "steady") for _ in range(6)], replay(rank)["steady"]
    )
    assert (steps[0].peak_reserved_bytes < steps[-1].peak_reserved_bytes) is grows
    assert steps[0].driver_calls
    assert (told, told.driver_calls) == (steps[-1], {})


def test_on_a_full_device_the_cache_is_released_and_counted_and_then_the_op_is_refused():
    rank = program(
        op(0, activations("x", 30 * MIB)), op(1, Free("x")),
        op(2, activations("y", 32 * MIB), stream="all_gather"),
        op(3, Free("y"), stream="all_gather"),
    )
    steady = replay(rank, capacity=40 * MIB)["steady"]
    assert (steady.num_releases, steady.peak_reserved_bytes, steady.end_reserved_bytes) == (
        2, 32 * MIB, 32 * MIB,
    )
    assert steady.driver_calls == {
        0: DriverCalls(1, 1, 32 * MIB, 1, 30 * MIB), 2: DriverCalls(1, 1, 30 * MIB, 1, 32 * MIB)
    }
    with pytest.raises(
        DeviceFullError,
        match=r"forward a of the steady step: expected 33,554,432 B within 31,457,280 B",
    ):
        replay(rank, capacity=30 * MIB)


@pytest.mark.parametrize(("events", "message"), [
    ((Free("x"),), r"steady op 0 \(forward a\): expected a live buffer, found x: it is freed"),
    ((activations("x", 1), activations("x", 1)),
     "expected a buffer that is not live, found x: a second allocation"),
])
def test_a_buffer_freed_or_made_twice_is_refused_with_its_op(events, message):
    with pytest.raises(ProgramError, match=message):
        replay(program(op(0, *events)))


@WHOLE
@given(scenarios(), st.booleans())
def test_on_every_program_reserved_covers_active_and_active_covers_allocated_and_a_replay_repeats(
    case, expandable
):
    for rank in plan(case, device="cuda").ranks:
        records, ledger = (
            replay(rank, expandable_segments=expandable), memory.replay(rank, timeline=False),
        )
        for phase, record in records.items():
            assert (
                record.peak_reserved_bytes >= record.peak_active_bytes >= ledger[phase].peak_bytes
            )
            assert (
                record.peak_reserved_bytes >= record.end_reserved_bytes >= ledger[phase].end_bytes
            )
            assert record.peak_active_bytes - record.rounding_bytes <= ledger[phase].peak_bytes
            assert sum(record.reserved_by_pool.values()) == record.end_reserved_bytes
        assert replay(rank, expandable_segments=expandable) == records


@WHOLE
@given(scenarios())
def test_every_program_fits_into_what_it_reserves_and_the_least_device_is_no_larger(case):
    rank = plan(case, device="cuda").ranks[0]
    most = max(record.peak_reserved_bytes for record in replay(rank).values())
    assert replay(rank, capacity=most) == replay(rank)
    live = max(record.peak_bytes for record in memory.replay(rank, timeline=False).values())
    with pytest.raises(DeviceFullError):
        replay(rank, capacity=live - 1)


@settings(max_examples=12, deadline=None)
@given(with_micro_batches(), st.integers(0, 4), st.booleans())
def test_micro_batches_that_are_passed_over_do_what_the_one_before_did(case, short, expandable):
    """The room is without end, or as much as is reserved, or less."""
    rank = plan(case, device="cuda").ranks[0]
    whole = replace(rank, first_parts=(), steady_parts=())
    most = max(record.peak_reserved_bytes for record in replay(rank).values())
    for room in (None, most - short * SMALL_SEGMENT):
        told: list[object] = []
        for each in (rank, whole):
            try:
                records = replay(each, capacity=room, expandable_segments=expandable)
                told.append([records, *(record.driver_calls for record in records.values())])
            except DeviceFullError as error:
                told.append(str(error))
        assert told[0] == told[1]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("strategy", "accumulation", "once"), [
    ({"name": "fsdp2"}, 5, True), ({"name": "fsdp2", "reshard_after_forward": False}, 1, True),
    ({"name": "zero_redundancy"}, 2, True), ({"name": "fsdp2"}, 1, False),
])
def test_ranks_whose_first_passes_are_followed_once_have_the_records_of_each_alone(
    strategy, accumulation, once, expandable
):
    ranks = plan(zsim.Scenario(
        model={"family": "gpt", "sizes": {"num_layers": 2, "hidden_size": 24, "num_heads": 2,
                                          "vocabulary": 97, "max_positions": 8}},
        batch={"micro_batch": 1, "sequence_length": 8, "accumulation": accumulation},
        cluster={"preset": "dgx-h100", "ranks": 4}, strategy=strategy,
    ), device="cuda").ranks
    assert len(ranks) > 1
    if not once:
        ranks = tuple(replace(rank, first=tuple(map(replace, rank.first))) for rank in ranks)
    passes = min(begin_alike(ranks[0].first, each.first) for each in ranks)
    assert (passes > micro_batches(ranks[0], "first")[-1]) is once
    together = replay_each(ranks, expandable_segments=expandable, workspace_bytes=4 * MIB)
    for rank, records in zip(ranks, together, strict=True):
        alone = replay(
            rank, expandable_segments=expandable, workspace_bytes=4 * MIB, empty_cache="first"
        )
        assert records == alone
        for phase, record in alone.items():
            assert records[phase].driver_calls == record.driver_calls
            assert records[phase].repeats == record.repeats


def test_what_the_second_step_does_once_comes_between_the_two_and_is_counted_to_neither():
    """DDP lets one bucket go and makes several."""
    whole, halves = (
        64 << 20, [Alloc(f"half.{number}", "communication", 32 << 20) for number in range(2)],
    )
    once = (op(0, Free("whole"), *halves),)
    rank_program = program(op(0), construction=(op(0, activations("whole", whole)),))
    rebuilt = replace(rank_program, second=once)
    assert replay(rebuilt)["steady"] == replay(replace(rank_program, first=once))["steady"]
    records = memory.replay(rebuilt)
    assert (records["first"].peak_bytes, records["steady"].start_bytes) == (whole, whole)
    assert records["steady"].timeline == (("forward a", whole),)
    assert [
        event["frames"] for event in snapshot(rebuilt)["device_traces"][0]
        if "second" in str(event["frames"])
    ]
    with pytest.raises(ProgramError, match=r"second op 0 .*gone"):
        memory.replay(replace(rank_program, second=(op(0, Free("gone")),)))
    with pytest.raises(ProgramError, match=r"second op 0 .*gone"):
        replay(replace(rank_program, second=(op(0, Free("gone")),)))


def test_a_simulation_leaves_the_collector_nothing_of_zsims() -> None:
    """The collector is paused in simulations, and hardly runs in a loop of them. So 240 of Llama 3
    8B had left 160 MB of blocks, as neighbours know one another."""
    scenario = zsim.Scenario(
        model={"preset": "llama-tiny"}, batch={"micro_batch": 1, "sequence_length": 8},
        cluster={"preset": "dgx-h100"}, strategy={"name": "fsdp2"},
    )
    zsim.simulate(scenario)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        zsim.simulate(scenario)
        gc.collect()
        left = {type(each).__qualname__ for each in gc.garbage if "zsim" in type(each).__module__}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not left
