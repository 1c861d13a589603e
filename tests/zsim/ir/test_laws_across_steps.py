"""Laws of Programs from one step to the next: gathered parameters that stay, and seeded defects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Op
from zsim.ir.program import Program, RankProgram
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

KEEPS_RECOMPUTED = """
model = { family = "mlp", sizes = { dims = [5, 5], hidden = 7, num_classes = 3 }, uses = { times = 2, order = "stack" } }
batch = { micro_batch = 2 }
activation_checkpointing = { mode = "full" }
frozen = ["*.fc1.*"]
wrapping = { nested = ["fc1"] }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp2", reshard_after_forward = true }
"""  # noqa: E501
"""A frozen unit in a block is gathered last by a recomputation, after its own backward, and stays
so until the next step."""

KEEPS_FROZEN = """
model = { family = "mlp", sizes = { dims = [5, 5, 5], hidden = 7, num_classes = 3 } }
batch = { micro_batch = 2 }
frozen = ["blocks.0.*"]
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "fsdp1", sharding = "grad_op", dp_shard = 2 }
"""
"""A frozen first block is gathered in the first step, and never again."""


@pytest.mark.parametrize("text", [KEEPS_RECOMPUTED, KEEPS_FROZEN])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_not_trained_may_stay_gathered(text, device):
    assert program_laws.breaches(validate(planned(text, device))) == ()


def planned(text: str, device: str = "cpu") -> Program:
    return plan(parse(text.encode(), where="kept.toml"), device=device)


def laws_broken(program: Program) -> set[str]:
    """The laws that a valid Program breaks, without saying where."""
    return {breach.split(":")[0] for breach in program_laws.breaches(validate(program))}


def with_events(ops: tuple[Op, ...], index: int, *events: Alloc | Free) -> tuple[Op, ...]:
    """`ops` with other memory events of the op at `place`."""
    index %= len(ops)
    return (*ops[:index], replace(ops[index], memory=events), *ops[index + 1 :])


def without(ops: tuple[Op, ...], buffer: str, kind: type, index: int) -> tuple[Op, ...]:
    """`ops` without the first (0) or last (-1) allocation or free of `buffer`."""
    at = [
        op.index for op in ops for event in op.memory
        if isinstance(event, kind) and event.buffer == buffer
    ][index]
    kept = (e for e in ops[at].memory if not (isinstance(e, kind) and e.buffer == buffer))
    return with_events(ops, at, *kept)


def kept_frozen(**sections: tuple[Op, ...]) -> Program:
    """The Program of KEEPS_FROZEN with other ops in some phases."""
    program = planned(KEEPS_FROZEN)
    rank = replace(program.ranks[0], first_parts=(), steady_parts=(), **sections)
    return replace(program, ranks=(rank,))


def test_what_is_frozen_may_stay_gathered_and_is_read_in_every_step():
    program = kept_frozen()
    assert any("blocks.0" in op.reads for op in program.ranks[0].steady)
    assert all(op.unit != "blocks.0" or op.kind == "forward" for op in program.ranks[0].steady)
    assert program_laws.breaches(validate(program)) == ()


@pytest.mark.quality
def test_a_trained_unit_that_stays_gathered_from_step_to_step_breaks_a_law():
    """Every step finds it, reads it and leaves it, so that no byte leaks; but it is never new."""
    program = kept_frozen()
    rank, buffer = program.ranks[0], "blocks.1.unsharded"
    kept = kept_frozen(
        first=without(rank.first, buffer, Free, -1),
        steady=without(without(rank.steady, buffer, Alloc, 0), buffer, Free, -1),
    )
    assert program_laws.breaches(validate(kept)) == tuple(
        f"every unshard is resharded: program 0, {phase}: {buffer}, made by first op 6 "
        "(all_gather blocks.1), outlives the step, and its unit is trained"
        for phase in ("first", "steady")
    )


@pytest.mark.quality
def test_a_step_that_takes_for_gathered_what_the_one_before_has_freed_breaks_a_law():
    program = kept_frozen()
    first = program.ranks[0].first
    freed = with_events(first, -1, *first[-1].memory, Free("blocks.0.unsharded"))
    assert laws_broken(kept_frozen(first=freed)) == {"compute finds its parameters gathered"}


@pytest.mark.quality
def test_a_steady_step_that_frees_what_the_next_one_reads_breaks_a_law():
    program = kept_frozen()
    steady = program.ranks[0].steady
    freed = with_events(steady, -1, *steady[-1].memory, Free("blocks.0.unsharded"))
    assert program_laws.breaches(validate(kept_frozen(steady=freed))) == (
        "a steady step returns what it takes: program 0, steady: "
        "unsharded_parameters of blocks.0 are -328 B after the step",
    )


@pytest.mark.quality
def test_what_stays_gathered_for_nothing_breaks_a_law():
    program = kept_frozen()
    unread = tuple(
        replace(op, reads=tuple(unit for unit in op.reads if unit != "blocks.0"))
        for op in program.ranks[0].steady
    )
    broken = program_laws.breaches(validate(kept_frozen(steady=unread)))
    assert [breach.split(": ")[0] for breach in broken] == ["every unshard is resharded"] * 2
    assert broken[0].endswith("outlives the step, and the next one neither reads nor frees it")


def of_steps(first: tuple[Op, ...], steady: tuple[Op, ...]) -> Program:
    rank = RankProgram(construction=(), first=first, steady=steady)
    return validate(Program(mesh=Mesh(dp_shard=2), ranks=(rank,), assignment=(0, 0)))


def gather(index: int, unit: str, *, waits: tuple[int, ...] = ()) -> Op:
    return Op(
        index=index, kind="all_gather", unit=unit, stream="all_gather", group="dp_shard", nbytes=8,
        waits=waits, memory=(Alloc(f"{unit}.unsharded", "unsharded_parameters", 8),),
    )


def read(index: int, unit: str, *, waits: tuple[int, ...] = ()) -> Op:
    return Op(index=index, kind="forward", unit=unit, stream="compute", reads=(unit,), waits=waits)


def free(index: int, unit: str) -> Op:
    return Op(
        index=index, kind="free", unit=unit, stream="host", memory=(Free(f"{unit}.unsharded"),)
    )


@pytest.mark.quality
def test_compute_that_awaits_no_all_gather_of_the_step_before_breaks_a_law():
    first = (gather(0, "a"),)
    awaited = (gather(0, "b"), read(1, "b", waits=(0,)), read(2, "a"), free(3, "b"))
    assert program_laws.breaches(of_steps(first, awaited)) == ()  # gathers end in order
    assert program_laws.breaches(of_steps(first, (read(0, "a"),))) == (
        "compute waits for its all-gather: program 0, steady: op 0 (forward a) does not wait for "
        "the all-gather of a in the step before",
    )


@pytest.mark.quality
def test_a_gather_over_what_the_step_before_has_gathered_breaks_a_law():
    first = (gather(0, "a"), read(1, "a", waits=(0,)))
    again = gather(3, "a", waits=(2,))

    def steady(*waits: int) -> tuple[Op, ...]:
        return (
            read(0, "a"), free(1, "a"), gather(2, "b", waits=waits), read(3, "b", waits=(2,)),
            free(4, "b"), replace(again, index=5, waits=(3,)), read(6, "a", waits=(5,)),
        )

    assert program_laws.breaches(of_steps(first, steady(0))) == ()
    assert laws_broken(of_steps(first, steady())) == {"gathers overwrite nothing that is read"}
