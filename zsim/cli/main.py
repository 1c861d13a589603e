"""The command line `zsim`: reads arguments, calls a command, turns errors into words and exit
codes.

0 fine, 1 a verdict failed, 2 bad usage or bad scenario, 3 backend not available. Nothing heavy is
imported until a command needs it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from signal import SIGINT, SIGTERM

from zsim.cli import arguments
from zsim.cli.commands import run_of
from zsim.cli.parser import parser, read
from zsim.cli.streams import guarded
from zsim.errors import ScenarioError, ZsimError, visible
from zsim.io.system.signals import Terminated, terminable
from zsim.ir.gc_pause import uncollected


class LackError(ZsimError):
    """Error: the machine has not enough memory for what was asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    atexit.register(gc.freeze)  # else Python's last collections search all objects, for 50 ms
    with guarded(), terminable():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    if not argv:
        parser(()).print_help()
        return 0
    as_json = "--json" in argv
    try:
        try:
            with uncollected():
                options = read(argv)
                run = run_of(options.command)
        except SystemExit as error:  # --help
            return int(error.code or 0)
        code = run(options)
        sys.stdout.flush()
    except ZsimError as error:
        return _say(error, as_json=as_json)
    except MemoryError:
        lack = LackError(
            where="this machine", expected="enough memory", found="none left",
            remedy="free some, or ask for less",
        )
        return _say(lack, as_json=as_json)
    except OSError as error:  # standard output is full
        return _full(error)
    except KeyboardInterrupt as error:
        kept = "".join(f"; {visible(note)}" for note in getattr(error, "__notes__", ()))
        if isinstance(error.__cause__ or error, Terminated):
            sys.stderr.write(f"zsim: ended by SIGTERM{kept}\n")
            return 128 + SIGTERM
        sys.stderr.write(f"zsim: interrupted{kept}\n")
        return 128 + SIGINT
    return code


def _full(error: OSError) -> int:
    sys.stderr.write(f"zsim: standard output: {error.strerror}\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _say(error: ZsimError, *, as_json: bool) -> int:
    problems = (
        list(error.problems) if isinstance(error, ScenarioError)
        else [arguments.with_options(error)]
    )
    for problem in problems:
        sys.stderr.write(f"zsim: {problem}\n")
    sys.stderr.write(f"{visible(error.details)}\n" if error.details else "")
    if as_json:
        try:
            sys.stdout.write(json.dumps({"error": problems, "exit_code": error.exit_code}) + "\n")
            sys.stdout.flush()
        except OSError as full:
            _full(full)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
