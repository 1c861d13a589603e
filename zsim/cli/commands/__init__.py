"""The commands of `zsim` by name: a file for each, or for some that are alike, loaded when it is
called. A command's function takes the parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module


def _called(file: str, function: str, options: argparse.Namespace) -> int:
    """The exit code of a command; few commands need what others load."""
    code: int = getattr(import_module(f"{__name__}.{file}"), function)(options)
    return code


_FUNCTIONS = {
    "run": ("runs", "run"), "validate": ("runs", "validate"), "compare": ("runs", "compare_saved"),
    "show": ("show", "show"), "fit": ("fit", "least"), "list": ("listing", "listing"),
    "plan": ("plan", "planned"), "sweep": ("sweep", "swept"),
    "accuracy": ("calibration.accuracy", "show"),
    "calibrate": ("calibration.calibrate", "calibrated"), "import": ("files.imports", "imported"),
    "lint": ("lint", "linted"), "explain": ("explain", "explained"),
    "checkpoint": ("checkpoint", "shown"), "report": ("report", "reported"),
    "diff": ("diff", "shown"), "new": ("setup.new", "made"), "doctor": ("setup.doctor", "told"),
    "trace": ("files.trace", "traced"), "export": ("files.exports", "exported"),
    "completion": ("setup.completion", "printed"),
}
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    name: partial(_called, *where) for name, where in _FUNCTIONS.items()
}
