"""Options that several commands have."""

from __future__ import annotations

import argparse

from zsim.cli import arguments
from zsim.runs.compare.aspects import ASPECTS
from zsim.runs.modes import NUMERICS_MODES


def json_option(command: argparse.ArgumentParser) -> None:
    """Add --json to `command`."""
    command.add_argument("--json", action="store_true", help="one JSON object on standard "
                                                             "output, nothing else there")


def verbose_option(command: argparse.ArgumentParser) -> None:
    """Add --verbose to `command`."""
    command.add_argument(
        "-v", "--verbose", action="store_true", help="sizes in bytes, not only in MiB and GiB"
    )


def scenario_option(command: argparse.ArgumentParser) -> None:
    """Add the one scenario file."""
    command.add_argument("scenario", type=arguments.path, metavar="SCENARIO")


def scenarios_option(command: argparse.ArgumentParser) -> None:
    """Add scenario files and folders, and --json, to `command`."""
    command.add_argument(
        "scenarios", nargs="+", type=arguments.path, metavar="SCENARIO",
        help="scenario files, or folders of them",
    )
    json_option(command)


def folder_option(command: argparse.ArgumentParser) -> None:
    """Add --scenarios, where saved Runs are read, to `command`."""
    command.add_argument(
        "--scenarios", metavar="FOLDER", type=arguments.path,
        help="folder with the scenarios of saved Runs",
    )


def require_option(command: argparse.ArgumentParser) -> None:
    """Add --require to `command`."""
    command.add_argument(
        "--require", type=arguments.aspects, default=(), metavar="time,…",
        help=f"fail where one of these was not checked: {', '.join(ASPECTS)}",
    )


def run_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how a backend runs a scenario to `command`."""
    verbose_option(command)
    command.add_argument(
        "--ranks", type=arguments.ranks, metavar="0,7",
        help="the ranks to observe (default: first and last)",
    )
    command.add_argument("--all-ranks", action="store_true", help="every rank, even identical ones")
    command.add_argument(
        "--interpreter", choices=("executor", "observer"),
        help="executor: zsim's own Program is run; observer: torch's is run and recorded",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default=None,
        help="device of the ranks: fake on a CPU (default) or a GPU, gloo on CPUs, nccl on GPUs",
    )
    module_option(command)
    command.add_argument(
        "--numerics", choices=NUMERICS_MODES, default=None,
        help="the ranks that train a single-process reference of the whole model: all (full), the "
             "first (sampled), none (default: as many as memory and --timeout allow)",
    )
    command.add_argument(
        "--timeout", type=arguments.seconds, default=120.0, metavar="S",
        help="seconds until a rank counts as hung (default 120)",
    )


def module_option(command: argparse.ArgumentParser) -> None:
    """Add --module to `command`."""
    command.add_argument(
        "--module", metavar="PACKAGE.MODULE:FUNCTION", default=None,
        help="your own nn.Module in place of the scenario's model: a function that returns a dict "
             "with module and inputs, and perhaps loss and units. It is imported and called",
    )
