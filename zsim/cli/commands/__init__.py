"""The work of each command, in a file of its own, imported when it is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import cast

from zsim.cli.options import COMMANDS

Run = Callable[[argparse.Namespace], int]
"""Does what the options say; returns the exit code."""


def run_of(name: str) -> Run:
    """The function `run` in the file of the command `name`."""
    return cast(Run, import_module(f"{__name__}.{COMMANDS[name].file}").run)
