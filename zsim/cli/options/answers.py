"""Options that answer for keys of a scenario that another tool's config, or a user, leaves open."""

from __future__ import annotations

import argparse
from typing import Any

from zsim.cli import arguments

KEYS = {
    "nodes": "cluster.nodes", "ranks": "cluster.ranks",
    "sequence_length": "batch.sequence_length", "micro_batch": "batch.micro_batch",
    "accumulation": "batch.accumulation",
}
"""Keys of a scenario by the options that answer them."""


def add_answers(command: argparse.ArgumentParser) -> None:
    """Add the options for keys of a scenario that other tools' configs leave open."""
    command.add_argument(
        "--model", metavar="MODEL", default=None,
        help="a preset of `zsim list models`, a config.json, or a traced model",
    )
    command.add_argument(
        "--cluster", metavar="CLUSTER", default=None,
        help="a preset of `zsim list clusters`, or a cluster's file",
    )
    for name, key in KEYS.items():
        command.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", type=arguments.count, default=None,
            help=f"{key} of the scenario",
        )
    command.add_argument(
        "--set", metavar="KEY=VALUE", type=arguments.setting, action="append", default=[],
        dest="settings",
        help="any other key of the scenario, as optimizer.clip_norm=1.0; or a variable of a shell "
             "script of Megatron's, as NUM_LAYERS=32",
    )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Keys of the scenario that options answer, by name."""
    values = {key: getattr(options, name) for name, key in KEYS.items()}
    return {key: value for key, value in values.items() if value is not None} | dict(
        options.settings
    )
