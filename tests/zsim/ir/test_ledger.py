"""The ledger and its replay against a naive one that adds up all live buffers after each event."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases.micro_batch_cases import with_micro_batches
from tests.support.cases.sampling import WHOLE
from tests.support.folders import SCENARIOS
from zsim.errors import ProgramError
from zsim.ir.ledger import Ledger
from zsim.ir.ledger_replay import replay, replay_each
from zsim.ir.ops import MEMORY_KINDS, Alloc, Free, MemoryEvent, Op
from zsim.ir.program import PHASES, RankProgram, StepPart
from zsim.scenario import scenario
from zsim.scenario.plan import plan
from zsim.testing.strategies import scenarios


def op(index: int, *memory: MemoryEvent, unit: str = "a") -> Op:
    return Op(index=index, kind="forward", unit=unit, stream="compute", memory=memory)


def program(
    *steady: Op, construction: tuple[Op, ...] = (), first: tuple[Op, ...] = ()
) -> RankProgram:
    return RankProgram(construction=construction, first=first, steady=steady)


def naive(rank: RankProgram) -> dict[str, tuple[int, int, int, dict[str, int]]]:
    """Start, peak, end and the split at the first highest moment of each phase, from a plain dict
    of live buffers."""
    live: dict[str, Alloc] = {}
    levels = {}

    def total() -> int:
        return sum(alloc.nbytes for alloc in live.values())

    def split() -> dict[str, int]:
        return {
            kind: sum(a.nbytes for a in live.values() if a.kind == kind) for kind in MEMORY_KINDS
        }

    for phase in PHASES:
        start = total()
        peak = (start, split())
        for event in (event for op in rank.phase(phase) for event in op.memory):
            if isinstance(event, Alloc):
                live[event.buffer] = event
            else:
                del live[event.buffer]
            if total() > peak[0]:
                peak = (total(), split())
        levels[phase] = (start, peak[0], total(), peak[1])
    return levels


def by_ledger(rank: RankProgram) -> dict[str, tuple[int, list[int]]]:
    """The end of each phase, and the bytes after each of its ops, by `Ledger.apply`."""
    ledger, phases = Ledger(), {}
    for phase in PHASES:
        for op in rank.before(phase):
            ledger.apply(op)
        after = []
        for op in rank.phase(phase):
            ledger.apply(op)
            after.append(ledger.allocated)
        phases[phase] = (ledger.allocated, after)
    return phases


@WHOLE
@given(with_micro_batches())
def test_micro_batches_that_find_the_same_buffers_have_the_bytes_of_those_followed(case):
    for rank in plan(case, device=case.cluster.kind).ranks:
        followed = {
            phase: replace(record, timeline=()) for phase, record in replay(rank).items()
        }
        assert replay(rank, timeline=False) == followed


@WHOLE
@given(scenarios())
def test_the_replay_is_the_ledger_and_the_naive_one_on_every_program(case):
    for rank in plan(case, device=case.cluster.kind).ranks:
        assert by_ledger(rank) == {
            phase: (record.end_bytes, [nbytes for _, nbytes in record.timeline])
            for phase, record in replay(rank).items()
        }
        seen = {
            phase: (record.start_bytes, record.peak_bytes, record.end_bytes, dict(record.by_kind))
            for phase, record in replay(rank, timeline=False).items()
        }
        assert seen == naive(rank)


@given(st.data())
def test_the_replay_is_the_naive_one_on_random_events(data):
    live: list[str] = []
    phases: dict[str, list[Op]] = {phase: [] for phase in PHASES}
    for index in range(data.draw(st.integers(0, 25))):
        if live and data.draw(st.booleans()):
            event: MemoryEvent = Free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            kind = data.draw(st.sampled_from(MEMORY_KINDS))
            event = Alloc(f"b{index}", kind, data.draw(st.integers(0, 9)))
            live.append(f"b{index}")
        ops = phases[
            data.draw(st.sampled_from(
                PHASES[:1] if index < 8 else PHASES[1:2] if index < 16 else PHASES[2:]
            ))
        ]
        ops.append(op(len(ops), event))
    rank = RankProgram(**{phase: tuple(ops) for phase, ops in phases.items()})
    seen = {
        phase: (record.start_bytes, record.peak_bytes, record.end_bytes, dict(record.by_kind))
        for phase, record in replay(rank).items()
    }
    assert seen == naive(rank)


def test_a_record_says_where_the_peak_is_of_what_and_what_was_live_after_each_op():
    rank = program(
        op(0, Alloc("x", "inputs", 3), Alloc("y", "activations", 4), Free("x"), unit="one"),
        op(1, Alloc("z", "temporaries", 2), Free("z"), unit="two"),
        op(2, Alloc("w", "gradients", 5), Free("w"), Free("y"), unit="three"),
        construction=(op(0, Alloc("p", "parameters", 100)),),
    )
    steady = replay(rank)["steady"]
    assert (steady.start_bytes, steady.peak_bytes, steady.end_bytes) == (100, 109, 100)
    assert steady.peak_at == "forward three"
    assert {k: v for k, v in steady.by_kind.items() if v} == {
        "parameters": 100, "activations": 4, "gradients": 5
    }
    assert steady.timeline == (("forward one", 104), ("forward two", 104), ("forward three", 100))


def test_what_a_rank_holds_is_told_after_the_last_op_of_its_optimizer():
    """Clipping comes before it and is the optimizer's work too."""
    clip = replace(op(0, Alloc("n", "temporaries", 4)), kind="optimizer", unit="clip")
    step = replace(op(1, Free("n"), Alloc("s", "optimizer_states", 8)), kind="optimizer")
    zero_grad = op(2, Alloc("g", "gradients", 2))
    held = replay(program(clip, step, zero_grad))["steady"].held
    assert held == {"parameters": 0, "gradients": 0, "optimizer_states": 8}


def test_memory_of_ops_that_only_the_second_step_has_counts_in_the_steady_one():
    rank = replace(
        program(op(0, Alloc("y", "activations", 4), Free("y")), first=(op(0),)),
        second=(op(0, Alloc("b", "communication", 32)),),
    )
    levels = replay(rank)
    assert levels["first"].end_bytes == 0
    assert (levels["steady"].start_bytes, levels["steady"].peak_bytes) == (32, 36)


def test_a_phase_that_only_frees_peaks_at_its_start():
    rank = program(op(0, Free("p")), construction=(op(0, Alloc("p", "parameters", 100)),))
    steady = replay(rank, timeline=False)["steady"]
    assert (steady.peak_bytes, steady.peak_at, steady.timeline) == (100, "start", ())
    assert steady.by_kind["parameters"] == 100


def test_the_ledger_itself_refuses_what_the_replay_does():
    ledger = Ledger()
    ledger.allocate(Alloc("x", "inputs", 1))
    with pytest.raises(ProgramError, match="x: expected a buffer that is not live"):
        ledger.allocate(Alloc("x", "inputs", 1))
    ledger.free("x")
    with pytest.raises(ProgramError, match="x: expected a live buffer, found it is freed"):
        ledger.free("x")


@pytest.mark.parametrize(("events", "refusal"), [
    ((Free("x"),), r"steady op 0 \(forward a\): expected a live buffer, found x: it is freed"),
    ((Alloc("x", "inputs", 1), Alloc("x", "inputs", 1)),
     "expected a buffer that is not live, found x: a second allocation"),
    ((Alloc("x", "inputs", 1), Free("x"), Free("x")), "expected a live buffer, found x: it "
                                                      "is freed"),
])
def test_a_buffer_freed_or_made_twice_is_refused_with_its_op(events, refusal):
    with pytest.raises(ProgramError, match=refusal):
        replay(program(op(0, *events)))


def test_the_sums_of_a_ledger_follow_its_buffers():
    ledger = Ledger()
    ledger.apply(op(0, Alloc("x", "inputs", 3), Alloc("y", "inputs", 4), Free("x")))
    assert (ledger.allocated, ledger.by_kind["inputs"], set(ledger.live)) == (4, 4, {"y"})


def anew(rank):
    """The same program with ops and events of its own in each phase, so that every one of them is
    followed."""
    return replace(
        rank, steady=tuple(replace(op, memory=tuple(map(replace, op.memory))) for op in rank.steady)
    )


@pytest.mark.parametrize("name", ["fsdp2", "hsdp"])
def test_a_steady_phase_that_begins_as_the_first_one_did_is_as_if_it_had_been_followed(name):
    for path in sorted(SCENARIOS.glob(f"**/{name}*.toml"))[:6]:
        for rank in plan(scenario.load(path), device="cuda").ranks:
            assert rank.first[0] is rank.steady[0]
            assert replay(rank) == replay(anew(rank))


def test_ops_that_come_again_in_other_parts_have_the_peaks_of_their_own_parts():
    passes = (op(0, Alloc("x", "inputs", 3), Free("x")), op(1, Alloc("y", "inputs", 5), Free("y")))
    rank = RankProgram(
        construction=(), first=passes, steady=passes, first_parts=(StepPart("forward", 0, 0),),
        steady_parts=(StepPart("forward", 0, 0), StepPart("backward", 1, 0)),
    )
    assert [(part.name, part.peak_bytes) for part in replay(rank)["steady"].parts] == [
        ("forward", 3), ("backward", 5)
    ]
    assert replay(rank) == replay(anew(rank))


@pytest.mark.parametrize(("tail", "refusal"), [
    ((Alloc("x", "activations", 2),),
     r"steady op 0 \(forward a\): .* found x: a second allocation"),
    ((Free("y"),), r"steady op 0 \(forward a\): .* found y: it is freed"),
    ((Alloc("z", "optimizer_states", 5),), ""),
])
def test_ops_that_come_again_are_followed_where_they_find_something_else(tail, refusal):
    passes = op(0, Free("y"), Alloc("x", "inputs", 3), Free("x"), Alloc("y", "parameters", 4))
    made = op(0, Alloc("y", "parameters", 4))
    rank = RankProgram(construction=(made,), first=(passes, op(1, *tail)), steady=(passes,))
    if refusal:
        with pytest.raises(ProgramError, match=refusal):
            replay(rank)
    else:
        steady = replay(rank)["steady"]
        assert (steady.start_bytes, steady.peak_bytes, steady.end_bytes) == (9, 9, 9)
        assert replay(rank) == replay(anew(rank))


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "zero_redundancy"])
def test_programs_that_begin_alike_are_as_if_each_had_been_followed(name):
    for path in sorted(SCENARIOS.glob(f"**/{name}*.toml"))[:6]:
        ranks = plan(scenario.load(path), device="cuda").ranks
        again = [*ranks, *map(anew, ranks), *ranks]
        for timeline in (True, False):
            together = replay_each(again, timeline=timeline)
            assert together == [replay(rank, timeline=timeline) for rank in again]


def test_a_program_that_begins_like_another_is_followed_where_it_finds_something_else():
    passes = op(0, Free("y"), Alloc("x", "inputs", 3), Free("x"), Alloc("y", "parameters", 4))
    small, large = (
        RankProgram(
            construction=(op(0, Alloc("y", "parameters", nbytes)),), first=(passes,),
            steady=(passes,), first_parts=(StepPart(name, 0),), steady_parts=(StepPart(name, 0),),
        )
        for nbytes, name in ((4, "forward"), (9, "backward"))
    )
    for ranks in ((small, large), (large, small), (small, replace(small, first_parts=()))):
        assert replay_each(ranks) == [replay(rank) for rank in ranks]


def test_a_micro_batch_that_finds_a_buffer_of_the_one_before_is_followed():
    once = op(0, Alloc("x", "inputs", 3), Free("x"))
    leak = Alloc("y", "activations", 2)
    steady = (once, replace(once, index=1), op(2, leak), replace(once, index=3), op(4, leak))
    rank = RankProgram(
        construction=(), first=(), steady=steady,
        steady_parts=tuple(StepPart("forward", at, n) for n, at in enumerate((0, 1, 3))),
    )
    for timeline in (True, False):
        with pytest.raises(ProgramError, match=r"steady op 4 .* found y: a second allocation"):
            replay(rank, timeline=timeline)
