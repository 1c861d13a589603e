"""Lint: what a scenario does that its user may not want, found before anything is launched.

A rule is a function and a line in `RULES`. It reads the scenario's Program and simulates the mended
scenario, so each finding has its cost here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from zsim.analysis.lint import key_rules, order_rules, unit_rules
from zsim.analysis.lint.case import LintCase
from zsim.analysis.lint.finding import LintFinding
from zsim.errors import ArgumentError, ScenarioError, listed, shown
from zsim.io.arguments import described
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario_argument import require_scenario


@dataclass(frozen=True, slots=True)
class Rule:
    """A function that yields findings, and a sentence on why they matter."""

    find: Callable[[LintCase], Iterator[LintFinding]]
    why: str


RULES: dict[str, Rule] = {
    "one-unit": Rule(
        unit_rules.one_unit, "a unit is gathered whole, so one unit is the whole model at once"
    ),
    "tiny-units": Rule(
        unit_rules.tiny_units, "each unit is a collective, and each collective has its latency"
    ),
    "padded-shards": Rule(
        unit_rules.padded_shards, "padding is gathered as parameters are"
    ),
    "empty-shards": Rule(
        unit_rules.empty_shards, "ranks without a part wait for a collective of padding"
    ),
    "large-root": Rule(
        unit_rules.large_root, "fully_shard keeps the root gathered from forward to backward"
    ),
    "flat-mesh": Rule(
        order_rules.flat_mesh, "an axis of one rank makes no replicas, or no shards"
    ),
    "held-gradients": Rule(
        order_rules.held_gradients, "without a reduction gradients stay unsharded"
    ),
    "idle-prefetch": Rule(
        order_rules.idle_prefetch, "prefetch holds more units and helps only where links idle"
    ),
    "one-bucket": Rule(
        order_rules.one_bucket, "a bucket is reduced once its last gradient is there"
    ),
    "idle-keys": Rule(key_rules.idle_keys, "a key without effect hides what its author meant"),
}
"""Every rule by its name."""


def lint(scenario: Scenario, *, ignore: Collection[str] = ()) -> tuple[LintFinding, ...]:
    """The findings of all rules but those to `ignore`, and those in the scenario's `lint.ignore`.

    ArgumentError or ScenarioError for a name that is no rule's, DeadlockError for a lost link that
    the step needs.

    >>> from zsim.scenario.scenario import load
    >>> flat = load("scenarios/parity/hsdp-mlp-2x2.toml").with_(
    ...     strategy={"dp_replicate": 1, "dp_shard": 4}
    ... )
    >>> [finding.rule for finding in lint(flat, ignore=["tiny-units"])]
    ['flat-mesh']
    """
    require_scenario(scenario)
    expected = f"rules of {listed(RULES, 'and')}"
    if not isinstance(ignore, Collection):
        raise ArgumentError(where="ignore", expected=expected, found=described(ignore))
    for name in [ignore] if isinstance(ignore, str) else ignore:
        if name not in RULES:
            raise ArgumentError(where="ignore", expected=expected, found=described(name))
    for name in scenario.lint_ignore:
        if name not in RULES:
            problem = f"lint.ignore: expected {expected}, found {shown(name)}"
            raise ScenarioError((f"{scenario.name}: {problem}",))
    case = LintCase(scenario)
    if scenario.cluster.lost_rails:  # before a mended step, whose collectives are not the user's
        _ = case.step_ns
    return tuple(
        replace(finding, rule=name, why=rule.why)
        for name, rule in RULES.items()
        if name not in ignore and name not in scenario.lint_ignore
        for finding in rule.find(case)
    )
