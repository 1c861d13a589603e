"""Options of commands about one scenario or several: their memory, time and alternatives."""

from __future__ import annotations

import argparse

from zsim.analysis.planner.goal import GOALS
from zsim.cli import arguments
from zsim.cli.options import shared


def checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim checkpoint`."""
    shared.scenario_option(command)
    command.add_argument(
        "--to-ranks", type=arguments.some_ranks, default=None, metavar="M",
        help="load it on so many ranks (default: those that save it)",
    )
    command.add_argument(
        "--folder", type=arguments.path, default=None, metavar="DIR",
        help="check that the checkpoint in this folder is one of the scenario, and whole",
    )
    shared.json_option(command)


def diff(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim diff`."""
    command.add_argument("base", type=arguments.path, metavar="BASE.toml")
    command.add_argument("head", type=arguments.path, metavar="HEAD.toml")
    command.add_argument(
        "--markdown", metavar="FILE.md", type=arguments.path, default=None,
        help="write the table for a comment",
    )
    command.add_argument(
        "--junit", metavar="FILE.xml", type=arguments.path, default=None,
        help="write each figure as a test case in JUnit's XML, for CI",
    )
    command.add_argument(
        "--fail-if", metavar="peak:+2%,step:+5%", default="",
        help="growths that fail; of peak, first_peak, step, exposed, sent, collectives",
    )
    shared.json_option(command)


def explain(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim explain`."""
    command.add_argument(
        "dumps", nargs="+", type=arguments.path, metavar="DUMP",
        help="JSON of the flight recorder, one file of each rank, as rank_3.json; or folders",
    )
    shared.json_option(command)


def fit(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim fit`."""
    shared.scenario_option(command)
    shared.module_option(command)
    shared.json_option(command)


def lint(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim lint`."""
    shared.scenarios_option(command)
    command.add_argument(
        "--ignore", type=arguments.names, default=(), metavar="RULE,…",
        help="rules to skip; in a scenario lint = { ignore = [\"RULE\"] }",
    )
    shared.module_option(command)


def plan(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim plan`."""
    shared.scenario_option(command)
    command.add_argument(
        "--nodes", type=arguments.counts, default=(), metavar="1,2,4",
        help="numbers of nodes to try (default: the scenario's)",
    )
    command.add_argument(
        "--micro-batch", type=arguments.counts, default=(), metavar="1,2,4",
        help="micro-batches to try (default: powers of two)",
    )
    command.add_argument(
        "--global-batch", type=arguments.count, default=None, metavar="N",
        help="sequences of a step over all ranks, which accumulation fills (default: the "
             "scenario's)",
    )
    command.add_argument(
        "--tokens", type=arguments.number, default=None, metavar="1e12",
        help="tokens to train on; also prints days and GPU hours",
    )
    command.add_argument(
        "--days", type=arguments.number, default=None, metavar="D",
        help="days that --tokens may take; what is slower is left out",
    )
    command.add_argument(
        "--price", type=arguments.number, default=None, metavar="P", help="price of one GPU hour"
    )
    command.add_argument(
        "--budget", type=arguments.number, default=None, metavar="M",
        help="money that --tokens may take at --price; what is dearer is left out",
    )
    command.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V1,V2",
        help="values of any other key of the scenario to try, as wrapping.every=1,2; repeatable",
    )
    command.add_argument(
        "--goal", choices=GOALS, default="fastest",
        help="least time (default), fewest GPU hours, or fewest GPUs",
    )
    command.add_argument(
        "--all", action="store_true", help="every other candidate too, with the reason against it"
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default=None,
        help="write the scenario to take",
    )
    shared.json_option(command)


def report(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim report`."""
    command.add_argument(
        "inputs", nargs="+", type=arguments.path, metavar="SCENARIO|RUN.json",
        help="scenario files or folders, simulated; saved Runs; side by side",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.html", type=arguments.path, required=True,
        help="the page to write; it needs no network and no other file",
    )
    shared.json_option(command)


def show(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim show`."""
    shared.scenario_option(command)
    command.add_argument("--program", action="store_true", help="the Program, one line per op")
    command.add_argument("--memory", action="store_true", help="memory verdict, live buffers at "
                                                               "the peak, changes that save memory")
    command.add_argument("--time", action="store_true", help="time by cause, exposed "
                                                             "communication, changes that hide it")
    command.add_argument(
        "--snapshot", metavar="FILE", type=arguments.path,
        help="write the allocator's history for PyTorch's memory visualiser",
    )
    shared.module_option(command)
    shared.json_option(command)


def sweep(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim sweep`."""
    command.add_argument(
        "file", type=arguments.path, metavar="SWEEP.toml",
        help='scenario = "FILE.toml", and [axes] with lists: batch.micro_batch = [1, 2, 4]',
    )
    command.add_argument(
        "-o", "--out", metavar="FILE", type=arguments.path, default=None,
        help="write the table (.csv, .jsonl, .parquet); an interrupted sweep into the same file "
             "goes on where it stopped",
    )
    command.add_argument(
        "--on", default="loky", metavar="loky",
        help="executor of the points: loky (processes here, default), here (this process), "
             "dask[:ADDRESS], ray[:ADDRESS]",
    )
    command.add_argument(
        "--workers", type=arguments.count, default=None, metavar="N",
        help="workers here (default: one for each core)",
    )
    command.add_argument(
        "--plot", metavar="FILE.svg", type=arguments.path, default=None,
        help="draw tokens/s against needed memory (.svg, .png, .pdf)",
    )
    shared.json_option(command)
