"""`zsim export`: a scenario as a config of another tool, or as its input."""

from __future__ import annotations

import argparse
from pathlib import Path

from zsim.cli import outputs, terminal
from zsim.cli.inputs import UsageError, load_one
from zsim.configs.front import export_config
from zsim.io import files


def run(options: argparse.Namespace) -> int:
    """`zsim export KIND SCENARIO`: 0 where the scenario has a config of that kind."""
    scenario = load_one(options.scenario)
    result = export_config(scenario, options.kind)
    several = set(result.files) != {""}
    if several and not options.out:
        raise UsageError(
            where="-o", expected=f"a prefix of {len(result.files):,} files", found="none"
        )
    targets = {
        name: Path(f"{options.out}.{name}" if name else options.out) for name in result.files
    } if options.out else {}
    for target in targets.values():
        outputs.require(target, option="-o", apart_from=[Path(options.scenario)])
    for name, target in targets.items():
        files.write(target, result.files[name])
    if options.json:
        terminal.write_json({
            "kind": result.kind, "unsaid": list(result.unsaid),
            "files": list(map(str, targets.values())) if targets else [],
            "text": None if several else result.text,
        })
    elif not targets:
        for line in result.text.splitlines():
            terminal.say(line)
    if result.unsaid:
        terminal.note(f"not in a config of {result.kind}: {'; '.join(result.unsaid)}")
    for target in list(targets.values())[-1:]:
        terminal.wrote(target, f", and {len(targets) - 1:,} more" if several else "")
    return 0
