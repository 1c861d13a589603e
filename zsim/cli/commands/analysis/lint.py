"""`zsim lint`: mistakes of scenarios that run all the same, with their costs, before any launch."""

from __future__ import annotations

import argparse

from zsim.analysis.lint.finding import LintFinding
from zsim.analysis.lint.rules import RULES, lint
from zsim.cli import terminal
from zsim.cli.inputs import load_one, scenario_files
from zsim.errors import ScenarioError, ZsimError
from zsim.io.units import counted, rounded_sizes
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs import real_run, registry
from zsim.runs.backend import RunOptions
from zsim.scenario.scenario import Scenario


def run(options: argparse.Namespace) -> int:
    """`zsim lint`: 0 without findings, 1 with some; a file that is no scenario, and a scenario
    without a Program, stop no other."""
    results: list[tuple[Scenario, tuple[LintFinding, ...]]] = []
    failures: list[tuple[str, ZsimError]] = []
    backend, simulated = registry.SimBackend(), RunOptions(module=options.module)
    for path in scenario_files(options.scenarios):
        try:
            scenario = load_one(str(path))
        except ScenarioError as error:
            failures.append((str(path), error))
            continue
        with terminal.progress(f"{scenario.name}: {counted(len(RULES), 'rule')}"):
            try:
                case = real_run.with_module(backend, scenario, simulated)
                results.append((scenario, lint(case, ignore=options.ignore)))
            except ZsimError as error:
                failures.append((scenario.name, error))
    if options.json:
        terminal.write_json({
            "schema_version": SCHEMA_VERSION,
            "scenarios": [
                {"scenario": scenario.name, "findings": [each.to_dict() for each in findings]}
                for scenario, findings in results
            ],
            "errors": [{"scenario": name, "error": str(problem)} for name, problem in failures],
        })
    else:
        for scenario, findings in results:
            _print(scenario, findings)
        for name, failure in failures:
            for line in failure.under(name):
                terminal.say(f"{name}: not linted: {line}")
    if failures:
        return max(failure.exit_code for _, failure in failures)
    return 1 if any(findings for _, findings in results) else 0


def _print(scenario: Scenario, findings: tuple[LintFinding, ...]) -> None:
    number = counted(len(findings), "finding") if findings else "no finding"
    terminal.say(f"{scenario.name}: {number}")
    for finding in findings:
        lines = [f"  {finding.rule}: {finding.fact}", f"      why: {finding.why}"]
        lines += [f"      here it {finding.cost}"] if finding.cost else []
        mend = f"{finding.remedy}; or lint = {{ ignore = [\"{finding.rule}\"] }}"
        for line in (*lines, f"      mend: {mend}"):
            terminal.say_wrapped(rounded_sizes(line), hanging=10)
