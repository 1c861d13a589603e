"""Arguments of the commands that read files of other tools and write them."""

from __future__ import annotations

import argparse
from typing import Any

from zsim.cli import arguments

CONFIGS = ("accelerate", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers")
"""Kinds of configs that `zsim import` reads, besides traces."""


def add(commands: Any) -> None:
    """Add each command to the parsers of `commands`."""
    _import(commands)


def _import(commands: Any) -> None:
    reading = commands.add_parser(
        "import",
        help="make a scenario of another tool's config, or a Run of a trace of your own training",
        allow_abbrev=False,
    )
    reading.add_argument(
        "files", nargs="+", type=arguments.path, metavar="[KIND] FILE",
        help=f"a config, of one of the kinds {', '.join(CONFIGS)}, which its content tells if "
             "KIND is left out; or kineto and one trace of torch's profiler for each rank",
    )
    reading.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default=None,
        help="write the scenario (default: print it)",
    )
    _answers(reading)
    reading.add_argument(
        "--drop", type=arguments.names, default=(), metavar="KEY,…",
        help="keys of the config to leave out",
    )
    reading.add_argument(
        "--recipe", metavar="NAME", default="",
        help="of a Python config of torchtitan: the function that makes the config",
    )
    reading.add_argument(
        "--scenario", metavar="SCENARIO", type=arguments.path, default=None,
        help="with kineto: the scenario that this training is, for mesh and units",
    )
    reading.add_argument(
        "--save", metavar="RUN.json", type=arguments.path, default=None,
        help="with kineto: write the Run, for `zsim compare`",
    )
    arguments.json_option(reading)


def _answers(command: argparse.ArgumentParser) -> None:
    """Add the options for keys of a scenario that other tools' configs leave open."""
    command.add_argument(
        "--model", metavar="MODEL", default=None,
        help="a preset of `zsim list models`, a config.json, or a traced model",
    )
    command.add_argument(
        "--cluster", metavar="CLUSTER", default=None,
        help="a preset of `zsim list clusters`, or a cluster's file",
    )
    for name, key in (("--nodes", "cluster.nodes"), ("--ranks", "cluster.ranks"),
                      ("--sequence-length", "batch.sequence_length"),
                      ("--micro-batch", "batch.micro_batch"),
                      ("--accumulation", "batch.accumulation")):
        command.add_argument(
            name, metavar="N", type=arguments.count, default=None, help=f"{key} of the scenario"
        )
    command.add_argument(
        "--set", metavar="KEY=VALUE", type=arguments.setting, action="append", default=[],
        dest="settings", help="any other key of the scenario, as optimizer.clip_norm=1.0",
    )
