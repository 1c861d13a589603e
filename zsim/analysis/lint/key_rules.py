"""The rule on keys that do nothing: without one, the Program and its times are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.analysis.lint.case import LintCase
from zsim.analysis.lint.finding import LintFinding
from zsim.errors import shown

TABLES = (
    "strategy", "optimizer", "activation_checkpointing", "wrapping", "execution", "allocator",
    "precision",
)
"""Tables whose keys are tried. Those of model, batch and cluster say what is trained, and where."""
NAMES = frozenset({"name", "mode"})
"""Keys that a table stands on."""
TRAINED = frozenset({"learning_rate", "weight_decay", "momentum", "betas", "eps", "clip_norm"})
"""Keys that change what is trained and not how."""


def idle_keys(case: LintCase) -> Iterator[LintFinding]:
    """Keys that are set to another value than the default, without which nothing changes."""
    if case.is_traced:
        return  # its tables do not say its model
    for table in TABLES:
        for key, value in _keys(case.scenario.tables.get(table)):
            other = case.without(table, key)
            if other is None or other.scenario == case.scenario or not _same(case, other):
                continue
            yield LintFinding(
                fact=f"{table}.{key} = {shown(value)} changes neither the Program nor a time nor "
                     "a byte here",
                remedy="leave it out, or see in scenarios/README.md what it needs",
            )


def _keys(table: Any) -> list[tuple[str, Any]]:
    if not isinstance(table, dict):
        return []
    return [(key, value) for key, value in table.items() if key not in NAMES | TRAINED]


def _same(case: LintCase, other: LintCase) -> bool:
    return (
        case.program == other.program
        and case.step_ns == other.step_ns
        and _reserves(case) == _reserves(other)
    )


def _reserves(case: LintCase) -> bool:
    """True where the caching allocator's setting counts: on GPUs alone."""
    return case.scenario.expandable_segments and case.scenario.cluster.kind == "cuda"
