"""The executor on two gloo ranks: collectives, memory and parameters of every strategy of ours, and
a Program that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.agreement import inexact
from tests.support.cases.sampling import one_in
from zreal import torch_private
from zreal.backends import GlooBackend
from zreal.executor.executor import execute
from zreal.meters import measured_step
from zsim.errors import ProgramError
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import PHASES, Program
from zsim.ir.run import RankRun
from zsim.runs.backend import RunOptions
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

RUNS = [
    ('"ddp"', (1, "every")), ('"ddp", bucket_cap_mb = 0.02', (2, "last")),
    ('"zero1", form = "all_reduce"', (2, "every")),
    ('"zero1", form = "reduce_scatter"', (3, "every")), ('"zero2"', (2, "last")),
    ('"zero2", granularity = "parameter"', (2, "every")), ('"zero3", lookahead = 0', (2, "last")),
    ('"zero3", lookahead = 1', (1, "every")),
    ('"zero3", lookahead = 2, granularity = "30000 B"', (2, "every")),
    ('"zero3", persistence_threshold = 2525', (2, "every")),
    ('"zero3", lookahead = 2, zero2_threshold = 5500', (2, "last")),
]
"""Strategies with their options, and micro-batches with when their gradients are reduced."""
GROUPS = [
    ('"zero1", form = "all_reduce"', "bf16", (2, "every")), ('"zero1"', "fp32", (2, "every")),
    ('"zero2"', "bf16", (2, "last")), ('"zero2", granularity = "900 B"', "fp32", (3, "every")),
    ('"zero3", lookahead = 2, granularity = "parameter"', "bf16", (3, "every")),
    ('"zero3", persistence_threshold = 101, zero2_threshold = 5500', "fp32", (2, "every")),
]
"""Strategies, dtypes of the parameters, and micro-batches, on two groups of two ranks."""
TOLERANCE = 1e-6
"""Relative, of any parameter after 3 steps in float32: sums over ranks and micro-batches are made
in another order."""


def scenario(
    strategy: str, *, parameters: str = "fp32", accumulation: tuple[int, str] = (1, "every"),
    ranks: int = 2, more: str = "",
) -> Scenario:
    """A scenario whose strategy is `strategy`, written as in the file after `name =`."""
    count, sync = accumulation
    text = f"""
model = {{ preset = "mlp-uneven" }}
batch = {{ micro_batch = 2, accumulation = {count} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = {strategy}, sync = "{sync}" }}
precision = {{ parameters = "{parameters}", reduce = "fp32" }}
{more}
"""
    return parse(text.encode(), where="test.toml")


def executed(case: Scenario) -> tuple[RankRun, ...]:
    """Runs of the executor on every gloo rank."""
    options = RunOptions(
        interpreter="executor", all_ranks=True,
        timeout_s=500,  # a busy machine is no failure: the default 120 s were once not enough
    )
    return GlooBackend().run(case, options=options).ranks


def differences(case: Scenario, run: RankRun) -> list[str]:
    """Differences of a rank's collectives, and of its memory in the steps, from the Program's."""
    program = plan(case, device="cpu").of_rank(run.rank)
    memory, problems = replay(program), []
    for phase in PHASES:
        issued = [
            (op.kind, op.nbytes, op.group) for op in program.phase(phase) if op.kind in COLLECTIVES
        ]
        seen = run.phases[phase]
        recorded = [(record.op, record.nbytes, record.group) for record in seen.collectives]
        if issued != recorded:
            problems.append(f"{phase}: issued {issued}, recorded {recorded}")
        predicted = (memory[phase].peak_bytes, memory[phase].end_bytes)
        if phase != "construction" and predicted != (seen.memory.peak_bytes, seen.memory.end_bytes):
            problems.append(f"{phase}: peak and end {predicted}, measured {seen.memory}")
    return problems


def parity(run: RankRun) -> float:
    """The largest relative difference of a parameter to the single-process reference."""
    assert run.numerics is not None
    return run.numerics.largest_relative_difference


@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "accumulation"), one_in(2, RUNS))
def test_two_ranks_do_what_the_program_says_and_train_as_one_process(
    strategy: str, accumulation: tuple[int, str]
) -> None:
    case = scenario(strategy, accumulation=accumulation)
    ranks = executed(case)

    assert [differences(case, run) for run in ranks] == [[], []]
    assert max(parity(run) for run in ranks) < TOLERANCE


def in_groups(strategy: str, parameters: str, accumulation: tuple[int, str]) -> Scenario:
    """The scenario on two groups of two ranks, clipped."""
    return scenario(
        f"{strategy}, dp_replicate = 2, dp_shard = 2", parameters=parameters, ranks=4,
        accumulation=accumulation, more='optimizer = { name = "adamw", clip_norm = 0.5 }',
    )


@pytest.mark.gloo
@pytest.mark.parametrize(("strategy", "parameters", "accumulation"), one_in(3, GROUPS))
def test_two_groups_of_two_ranks_do_what_the_program_says_and_train_as_one_process(
    strategy: str, parameters: str, accumulation: tuple[int, str]
) -> None:
    case = in_groups(strategy, parameters, accumulation)
    ranks = executed(case)

    assert [differences(case, run) for run in ranks] == [[]] * 4
    # twice the ranks, of which twice the sums are made in another order
    assert max(parity(run) for run in ranks) < (2 * TOLERANCE if parameters == "fp32" else 5e-2)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize(("strategy", "parameters", "accumulation"), GROUPS)
def test_order_bytes_groups_and_memory_of_every_mesh_are_exact_on_fake(
    strategy: str, parameters: str, accumulation: tuple[int, str], shards: int
) -> None:
    case = in_groups(strategy, parameters, accumulation)
    mesh = {"dp_replicate": 4 // shards, "dp_shard": shards}
    assert inexact(case.with_(strategy={**case.tables["strategy"], **mesh})) == []


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ['"ddp"', '"zero1"'])
def test_two_byte_parameters_follow_their_float32_master_copy(strategy: str) -> None:
    """Whole masters, and shards of them: zero2 and zero3 step theirs as zero1 does."""
    case = scenario(strategy, parameters="bf16")
    ranks = executed(case)

    assert [differences(case, run) for run in ranks] == [[], []]
    assert max(parity(run) for run in ranks) < 5e-2


@pytest.mark.parametrize(
    ("options", "accumulation"),
    [("", 1), (", find_unused_parameters = true", 1), (", bucket_cap_mb = 0.003", 2)],
)
def test_the_float32_copy_of_a_two_byte_bucket_lies_beside_what_backward_holds_then(
    options: str, accumulation: int
) -> None:
    """DDP reduces inside backward, whose caller holds the loss and its gradient until it returns,
    as autograd does a gradient that was added to others."""
    text = f"""
model = {{ family = "mlp", sizes = {{ dims = [8, 16, 24], hidden = 40, num_classes = 10 }} }}
batch = {{ micro_batch = 6, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "ddp"{options} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
"""
    assert inexact(parse(text.encode(), where="executed.toml"), interpreter="executor") == []


def without(program: Program, *, phase: str, drop: Op) -> Program:
    """`program` with one op of a phase left out."""
    rank = program.ranks[0]
    kept = tuple(op for op in rank.phase(phase) if op is not drop)  # type: ignore[arg-type]
    return replace(program, ranks=(replace(rank, **{phase: kept}),))


@pytest.mark.quality
@pytest.mark.parametrize("number", range(8))
def test_a_program_that_forgets_an_all_gather_is_refused(number: int) -> None:
    case = scenario('"zero3", lookahead = 1')
    program = plan(case, device="cpu")
    gathers = [op for op in program.ranks[0].first if op.kind == "all_gather"]
    sharded = pytest.raises(ProgramError, match=f"expected {gathers[number].unit} to be "
                                                f"unsharded, found it sharded")
    with torch_private.fake_group(rank=0, world_size=2), sharded:
        execute(case, without(program, phase="first", drop=gathers[number]), rank=0, steps=2)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_lowest_of_the_last_steps_is_the_steady_one(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose measured memory falls by a byte each, and then rises: of the last three the
    second is the lowest."""
    case = scenario('"zero3"')
    extra = iter([9, 8, 0, 5, 4, 6])
    record = measured_step.memory_record

    def higher(span: Any, *holds: Any) -> Any:
        taken = record(span, *holds)
        return replace(taken, peak_bytes=taken.peak_bytes + next(extra))

    monkeypatch.setattr(measured_step, "memory_record", higher)
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        run = execute(case, plan(case, device="cpu"), rank=0, steps=5, samples=samples).run
    least = replay(plan(case, device="cpu").of_rank(0))["steady"].peak_bytes
    assert run.phases["steady"].memory.peak_bytes - least == {1: 6, 3: 4}[samples]
