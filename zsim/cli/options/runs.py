"""Options of commands that run scenarios and compare Runs."""

from __future__ import annotations

import argparse

from zsim.cli import arguments
from zsim.cli.options import shared
from zsim.engine.detail import DETAILS
from zsim.runs.modes import COMPUTE_MODES


def compare(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim compare`."""
    command.add_argument("predicted", type=arguments.path, metavar="RUN_A.json")
    command.add_argument("measured", type=arguments.path, metavar="RUN_B.json")
    shared.require_option(command)
    shared.verbose_option(command)
    shared.json_option(command)


def run(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim run`."""
    shared.scenarios_option(command)
    command.add_argument("--backend", default="sim", help="sim (default), fake, gloo, nccl, or "
                                                      "another that is installed")
    command.add_argument(
        "--save", metavar="FILE", type=arguments.path,
        help="write the Run as JSON; with several scenarios a folder",
    )
    command.add_argument(
        "--trace", metavar="FILE", type=arguments.path,
        help="write a trace for Perfetto or Chrome (.json or .json.gz)",
    )
    command.add_argument(
        "--detail", choices=DETAILS, default=None,
        help="simulate collectives as flows (default), or rings as steps, hop by hop; in a "
             "scenario execution = { detail = \"steps\" }",
    )
    command.add_argument(
        "--seeds", metavar="N", type=arguments.count, default=None,
        help="simulate the step with so many seeds of its jitter: mean and quantiles",
    )
    shared.run_options(command)


def validate(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim validate`."""
    shared.scenarios_option(command)
    command.add_argument(
        "--against", default=None, metavar="BACKEND",
        help="the real backend (default gloo, with --device cuda nccl)",
    )
    command.add_argument(
        "--save", metavar="FOLDER", type=arguments.path,
        help="write both Runs of each scenario into a folder",
    )
    shared.require_option(command)
    command.add_argument(
        "--cluster", metavar="FILE.toml", type=arguments.path, default=None,
        help="this machine's constants (default: what `zsim calibrate --here` has left in the "
             "user's cache, else measured now, in 20 s)",
    )
    command.add_argument(
        "--no-calibrate", action="store_true",
        help="do not measure this machine at its first use; then times of CPU ranks are not "
             "judged",
    )
    command.add_argument(
        "--launch", metavar="'srun … {worker}'", default=None,
        help="start ranks by a cluster's launcher: a command with {worker}, and perhaps {nodes}, "
             "{ranks_per_node}, {ranks}. Results go to --save, a folder that all nodes see; what "
             "is there already is not run again",
    )
    command.add_argument(
        "--queue-timeout", type=arguments.seconds, default=86_400.0, metavar="S",
        help="seconds that --launch waits in the cluster's queue for the first rank to start "
             "(default a day); --timeout begins after that",
    )
    command.add_argument(
        "--trace", metavar="FILE", type=arguments.path, default=None,
        help="write predicted and measured step into one trace for Perfetto or Chrome (.json or "
             ".json.gz); with several scenarios a folder",
    )
    command.add_argument(
        "--junit", metavar="FILE.xml", type=arguments.path, default=None,
        help="write the verdicts as JUnit's XML, for CI",
    )
    command.add_argument(
        "--testbed", metavar="4x1gbit", type=arguments.layout, default=None,
        help="run gloo's ranks in hosts on a shaped network: HOSTSxRATE, "
             "NODESxHOSTSxRATE/UPLINK, then ,HOST=RATE for a slow link",
    )
    command.add_argument(
        "--compute", choices=COMPUTE_MODES, default="real",
        help="emulated: in timed steps forward and backward are timers of the predicted length",
    )
    shared.run_options(command)
