"""Options of commands to begin with."""

from __future__ import annotations

import argparse

from zsim.cli import arguments
from zsim.cli.options import answers, shared

LISTS = ("scenarios", "models", "clusters", "devices", "strategies", "backends")
"""Lists of names."""
SHELLS = ("bash", "zsh", "fish")


def completion(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim completion`."""
    command.add_argument("shell", choices=SHELLS, help='eval "$(zsim completion bash)"')


def doctor(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim doctor`."""
    shared.json_option(command)


def listing(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim list`."""
    lists = (*LISTS, "schema")
    command.add_argument(
        "what", nargs="?", choices=lists, metavar="|".join(lists),
        help="a single list, or the JSON Schema of scenario files (default: all lists)",
    )
    shared.json_option(command)


def new(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim new`."""
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default="scenario.toml",
        help="the file to write (default scenario.toml)",
    )
    answers.add_answers(command)
    command.add_argument(
        "--strategy", metavar="NAME", default=None, help="a strategy of `zsim list strategies`"
    )
    shared.json_option(command)
