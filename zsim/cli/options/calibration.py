"""Options of commands about measurements."""

from __future__ import annotations

import argparse

from zsim.cli import arguments
from zsim.cli.options import shared

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Collectives whose logs of nccl-tests are read."""


def accuracy(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim accuracy`."""
    command.add_argument(
        "folder", type=arguments.path, metavar="FOLDER",
        help="a folder of measurements: tables (zsim/calibration/README.md), nccl-tests' logs, "
             "saved Runs; or one file",
    )
    command.add_argument(
        "--plot", metavar="FILE.svg", type=arguments.path, help="draw predicted against measured"
    )
    command.add_argument("--explain", metavar="FILE:LINE", help="the scenario that a row is, "
                                                                 "and what it assumes")
    command.add_argument(
        "--collective", choices=COLLECTIVES,
        help="the collective of nccl-tests' logs that do not say it",
    )
    command.add_argument(
        "--cluster", metavar="PRESET", help="cluster preset of nccl-tests' logs"
    )
    shared.folder_option(command)
    shared.json_option(command)


def calibrate(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim calibrate`."""
    command.add_argument(
        "--from",
        dest="files",
        nargs="+",
        action="extend",
        default=[],
        type=arguments.path,
        metavar="FILE",
        help="tables, nccl-tests' text or JSON, saved Runs",
    )
    shared.folder_option(command)
    command.add_argument(
        "--here", action="store_true",
        help="measure this machine: steps and collectives with ranks at work, or its GPUs' kernels "
             "and collectives (about 2 minutes)",
    )
    command.add_argument(
        "--world-size", type=arguments.world_size, default=None, metavar="N",
        help="ranks at work while --here measures (default 2, of nccl all GPUs)",
    )
    command.add_argument(
        "--quick", action="store_true", help="measure less: --here in about 20 s"
    )
    command.add_argument(
        "--backend", default=None, metavar="BACKEND",
        help="device that --here measures: gloo, this machine's CPU (default), or nccl, its GPUs"
    )
    command.add_argument(
        "--cluster", default="", metavar="PRESET",
        help="the preset that --out begins with (default: that of all steps, else dgx-h100; of "
             "GPUs, their vendor's node)",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path,
        help="write the cluster with the fitted constants",
    )
    shared.json_option(command)
