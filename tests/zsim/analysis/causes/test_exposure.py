"""Exposed communication at the ends of a step, where no compute could hide it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.folders import SCENARIOS
from tests.support.programs import hand_made
from tests.support.programs.hand_made import TWO_BY_TWO, Plain, all_reduce, gather, program
from zsim.analysis.causes.critical_path import explain
from zsim.analysis.causes.why import Why, name
from zsim.analysis.simulated_step import explain_step
from zsim.cli.reports.time_report import timed
from zsim.engine.simulate import simulate
from zsim.ir.ops import Op, OpKind
from zsim.scenario import scenario
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned


def reasons(case: scenario.Scenario) -> Why:
    """Reasons for the length of the simulated step of `case`."""
    step = planned(case)
    return explain_step(case, step.program, timed(step).timeline)


def compute(index: int, kind: OpKind, ns: int, *waits: int, micro_batch: int = 0) -> Op:
    return hand_made.compute(index, "u", ns, *waits, kind=kind, micro_batch=micro_batch)


def explained(*ops: Op) -> Why:
    step = program(*ops, mesh=TWO_BY_TWO)
    return explain(step, simulate(step, costs=Plain()))


def ends(why: Why) -> dict[str, tuple[int, int, int]]:
    """Exposed time of each collective, and its shares before the first of forward and after a
    backward."""
    return {name(each.op): (each.exposed_ns, each.before_ns, each.after_ns) for each in why.exposed}


def test_the_first_gather_and_the_last_reduction_are_the_ends_of_a_step() -> None:
    """Between them a gather of 30 under compute of 10: 20 that a larger batch hides."""
    why = explained(
        gather(0, "a", 7), gather(1, "b", 30), compute(2, "forward", 10, 0),
        compute(3, "forward", 10, 1), compute(4, "backward", 10), all_reduce(5, "a", 5, 4),
        compute(6, "optimizer", 3, 5),
    )
    assert ends(why) == {
        "all_gather b": (20, 0, 0), "all_gather a": (7, 7, 0), "all_reduce a": (5, 0, 5)
    }
    assert (why.exposed_ns, why.before_ns, why.after_ns, why.at_ends_ns) == (32, 7, 5, 12)


def test_a_reduction_that_is_late_since_others_were_ahead_of_it_is_no_end() -> None:
    """Gradients of 40 after a backward of 10, beside another of 10: the 30 left of them are a
    backlog that longer compute hides."""
    why = explained(
        compute(0, "forward", 10), compute(1, "backward", 10), all_reduce(2, "b", 40, 1),
        compute(3, "backward", 10), all_reduce(4, "a", 5, 3), compute(5, "optimizer", 3, 4),
    )
    assert ends(why) == {"all_reduce b": (30, 0, 0), "all_reduce a": (5, 0, 5)}


def test_what_follows_a_reduction_on_its_stream_or_from_the_optimizer_is_at_the_end_too() -> None:
    """Parameters gathered after the optimizer, as ZeRO-1 does, and what only stands behind the
    reduction."""
    why = explained(
        compute(0, "forward", 10), compute(1, "backward", 10), all_reduce(2, "a", 5, 1),
        all_reduce(3, "norm", 2), compute(4, "optimizer", 3, 2), gather(5, "a", 4, 4),
    )
    assert ends(why) == {
        "all_reduce a": (5, 0, 5), "all_gather a": (4, 0, 4)
    }  # the norm's two are under the optimizer's three


@pytest.mark.parametrize(
    ("ahead", "expected"), [(28, {"all_gather c": (14, 0, 0)}), (1, {"all_reduce a": (6, 0, 6)})]
)
def test_every_micro_batch_that_awaits_its_reduction_has_an_end(
    ahead: int, expected: dict[str, tuple[int, int, int]]
) -> None:
    """Both wait for 6. A gather from 0 on is no end though forward waits for it longer: to 34, as
    the reduction has half its link."""
    why = explained(
        compute(0, "forward", 10), gather(1, "c", ahead), compute(2, "backward", 10),
        all_reduce(3, "a", 6, 2), compute(4, "forward", 10, 1, 3, micro_batch=1),
        compute(5, "backward", 10, micro_batch=1), all_reduce(6, "b", 6, 5),
        compute(7, "optimizer", 3, 6),
    )
    assert ends(why) == {"all_reduce b": (6, 0, 6), **expected}


@pytest.mark.parametrize(("path", "all_of_it"), [
    ("ddp-gpt-4", True), ("ddp-gpt-4-accumulate-every", True), ("zero-redundancy-gpt-4", True),
    ("zero1-gpt-4", False), ("zero2-gpt-4-accumulate-every", False),
    ("zero3-gpt-4-lookahead-2", False), ("zero3-gpt-2-accumulate-every", False),
    ("fsdp1-gpt-4", False), ("fsdp2-gpt-4", False), ("fsdp2-gpt-2-accumulate-every", False),
    ("hsdp-gpt-2x2", False), ("hsdp-gpt-2x2-accumulate-last", False),
])
def test_no_micro_batch_hides_what_is_at_the_ends(path: str, all_of_it: bool) -> None:
    """One bucket, as here under DDP, is all at the end. The ends of every strategy are what they
    were with 64 times the batch."""
    asked = scenario.load(SCENARIOS / f"parity/{path}.toml")
    both = []
    for times in (1, 64):
        larger = derived(asked,
            batch=replace(asked.batch, micro_batch=asked.batch.micro_batch * times)
        )
        both.append(reasons(larger))
    few, many = both
    assert (few.before_ns, few.after_ns) == (many.before_ns, many.after_ns)
    assert (few.at_ends_ns == few.exposed_ns) == all_of_it
    assert 0 < few.at_ends_ns <= many.exposed_ns <= few.exposed_ns
    assert all(
        collective.before_ns + collective.after_ns <= collective.exposed_ns for each in both
        for collective in each.exposed
    )
    assert (few.before_ns > 0) == path.startswith(("zero3", "fsdp", "hsdp"))
