"""`zsim run --seeds`: step times over seeds of a scenario's jitter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zsim.analysis.jitter import jitter
from zsim.cli import terminal
from zsim.cli.inputs import UsageError
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs import registry
from zsim.scenario.scenario import Scenario

WITH_NONE = ("save", "trace", "all_ranks", "ranks", "module", "interpreter")
"""Options that say how single runs are made or kept."""


def run_seeds(scenarios: Sequence[Scenario], options: argparse.Namespace) -> int:
    """`zsim run --seeds`: 0 where every scenario was simulated with each seed."""
    others = [name for name in WITH_NONE if getattr(options, name, None)]
    if others or options.backend != registry.SimBackend.name:
        other = f"--{others[0].replace('_', '-')}" if others else f"--backend {options.backend}"
        raise UsageError(
            where="--seeds", expected="the backend sim, and no single Run to keep",
            found=other[:60], remedy="leave one of the two out",
        )
    results = []
    for scenario in scenarios:
        with terminal.progress(f"{scenario.name}: {options.seeds} seeds"):
            steps = jitter(scenario, seeds=options.seeds)
        results.append(steps)
        if not options.json:
            head, *_ = str(steps).splitlines()
            terminal.table(head, list(steps.rows()))
    if options.json:
        objects = [{"schema_version": SCHEMA_VERSION, **steps.to_dict()} for steps in results]
        terminal.write_json(
            objects[0] if len(objects) == 1
            else {"schema_version": SCHEMA_VERSION, "scenarios": objects}
        )
    return 0
