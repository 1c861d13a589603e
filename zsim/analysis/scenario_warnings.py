"""Warnings of a scenario that runs but costs more than its user may think: a line each, with
figures from the Program.

It knows scenarios and Programs, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.analysis.lint import unit_rules
from zsim.analysis.lint.case import LintCase
from zsim.errors import Caveat
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
    """A model that is one param group, as the lint finds it; not where the lint is not to."""
    if "one-unit" not in scenario.lint_ignore:
        for finding in unit_rules.one_unit(LintCase(scenario)):
            yield f"{finding.fact}; {finding.remedy}"
