"""Warnings of a scenario that runs but costs more than its user may think: a line each, with
figures from the Program.

It knows scenarios and Programs, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.errors import Caveat
from zsim.ir.ledger import Ledger
from zsim.ir.program import Program
from zsim.models import wrapping
from zsim.models.training_options import DTYPE_NBYTES
from zsim.models.wrapping import Wrapping
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


def caveats(scenario: Scenario) -> tuple[Caveat, ...]:
    """Caveats of `scenario`, which runs all the same."""
    return tuple(map(Caveat, (*_half_precision(scenario), *_one_unit(scenario))))


def _half_precision(scenario: Scenario) -> Iterator[str]:
    """Parameters of fp16 that AdamW steps themselves, where there is no master copy."""
    keeps = STRATEGIES[scenario.strategy].formula.keeps
    if (
        scenario.precision.parameters == "float16"
        and scenario.optimizer.name == "adamw"
        and (keeps == "no master copy" or not scenario.precision.master)
    ):
        yield (
            f"adamw steps fp16 parameters themselves, as {scenario.strategy} keeps no master copy "
            "here; squares of gradients below 0.005 and its eps of 1e-8 are 0 in fp16, so "
            "parameters become infinite in torch too; take bf16, which has the range"
        )


def _one_unit(scenario: Scenario) -> Iterator[str]:
    """A model of which no part is wrapped by itself, where parameters are gathered: all at once,
    before anything computes."""
    model = scenario.model
    traced = model.family == wrapping.TRACED
    if len(model.units) > 1 or not (traced or model.blocks):
        return
    gathered = most_gathered(plan(scenario, device=scenario.cluster.kind))
    if gathered < model.num_parameters * DTYPE_NBYTES[scenario.precision.parameters]:
        return  # nothing is gathered, or buckets are
    cost = (
        f"the whole model is one param group: {gathered:,} B of parameters are gathered before "
        f"anything computes"
    )
    if traced:
        yield (
            f"{cost}, and nothing hides that or the reduction of gradients; trace it again with "
            f"units"
        )
        return
    by_block = scenario.with_parts(model=wrapping.wrapped(model, Wrapping()))
    least = most_gathered(plan(by_block, device=scenario.cluster.kind))
    if least >= gathered:
        return  # with such a lookahead blocks are all gathered too
    yield (
        f"{cost}, and nothing hides that or the reduction of gradients; with wrapping.every = 1, "
        f"one group per block, at most {least:,} B are gathered at a time, while others compute"
    )


def most_gathered(program: Program) -> int:
    """The most bytes of unsharded parameters that rank 0 holds at once in a steady step, without
    buffers of all-gathers."""
    ledger, most = Ledger(), 0
    rank = program.of_rank(0)
    for op in (*rank.construction, *rank.first, *rank.second):
        ledger.apply(op)
    for op in rank.steady:
        ledger.apply(op)
        most = max(most, ledger.by_kind["unsharded_parameters"])
    return most
