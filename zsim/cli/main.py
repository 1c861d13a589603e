"""The command line `zsim`: reads arguments, calls a command, turns errors into words and exit
codes.

0 fine, 1 a verdict failed, 2 bad usage or bad scenario, 3 backend not available. Nothing heavy is
imported until a command needs it.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from signal import SIGINT, SIGTERM

from zsim.cli import arguments, file_commands
from zsim.cli.streams import guarded
from zsim.errors import ScenarioError, ZsimError, visible
from zsim.io.system.signals import Terminated, terminable
from zsim.ir.gc_pause import uncollected
from zsim.runs.compare.aspects import ASPECTS
from zsim.runs.numerics_mode import NUMERICS_MODES
from zsim.version import __version__

EPILOG = (
    "exit codes: 0 fine, 1 a verdict failed, 2 bad usage or bad scenario, 3 backend not available"
)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
DETAILS = ("flows", "steps")
EXAMPLES = {
    "run": "zsim run mine.toml --trace step.json.gz",
    "validate": "zsim validate scenarios/parity/zero3-mlp-4.toml --require memory",
    "compare": "zsim compare predicted.json measured.json",
    "show": "zsim show mine.toml --memory --time", "fit": "zsim fit mine.toml",
    "plan": "zsim plan mine.toml --nodes 1,2,4 --tokens 1e12 --days 30 -o best.toml",
    "sweep": "zsim sweep axes.toml -o table.csv", "report": "zsim report mine.toml -o page.html",
    "accuracy": "zsim accuracy tests/published", "lint": "zsim lint mine.toml",
    "calibrate": "zsim calibrate --here --quick --out here.toml",
    "import": "zsim import ds_config.json --model llama-3-8b --cluster dgx-h100 -o mine.toml",
    "export": "zsim export fully_shard mine.toml -o parallelize.py",
    "trace": "zsim trace hf:config.json --input 2x2048 --dtype bf16 -o model.json",
    "new": "zsim new --model llama-3-8b --cluster dgx-h100 --nodes 2 -o mine.toml",
    "diff": "zsim diff base.toml head.toml --markdown comment.md --junit diff.xml",
    "doctor": "zsim doctor", "completion": "zsim completion zsh",
    "checkpoint": "zsim checkpoint mine.toml --to-ranks 16",
    "explain": "zsim explain dumps/", "list": "zsim list clusters",
}
"""An example of each command, below its help."""
LISTS = ("scenarios", "models", "clusters", "devices", "strategies", "backends", "schema")


class LackError(ZsimError):
    """Error: the machine has not enough memory for what was asked."""


def parser() -> arguments.Parser:
    """The argument parser with its commands."""
    top = arguments.Parser(
        prog="zsim",
        description="Simulate a ZeRO or FSDP training step, run the same step for real, and "
                    "compare the two.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"zsim {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="run scenarios on a backend and check what they expect", allow_abbrev=False
    )
    _scenarios(run)
    run.add_argument("--backend", default="sim", help="sim (default), fake, gloo, nccl, or "
                                                      "another that is installed")
    run.add_argument(
        "--save", metavar="FILE", type=arguments.path,
        help="write the Run as JSON; with several scenarios a folder",
    )
    run.add_argument(
        "--trace", metavar="FILE", type=arguments.path,
        help="write a trace for Perfetto or Chrome (.json or .json.gz)",
    )
    run.add_argument(
        "--detail", choices=DETAILS, default=None,
        help="simulate collectives as flows (default), or those that go round a ring as steps, "
             "hop by hop; in a scenario execution = { detail = \"steps\" }",
    )
    run.add_argument(
        "--seeds", metavar="N", type=arguments.count, default=None,
        help="simulate the step with so many seeds of its jitter: mean and quantiles",
    )
    _how(run)
    validate = commands.add_parser(
        "validate", help="simulate, run for real, compare: the main job", allow_abbrev=False
    )
    _scenarios(validate)
    validate.add_argument(
        "--against", default=None, metavar="BACKEND",
        help="the real backend (default gloo, with --device cuda nccl)",
    )
    validate.add_argument(
        "--save", metavar="FOLDER", type=arguments.path,
        help="write both Runs of each scenario into a folder",
    )
    _require(validate)
    validate.add_argument(
        "--cluster", metavar="FILE.toml", type=arguments.path, default=None,
        help="this machine's constants (default: what `zsim calibrate --here` has left in the "
             "user's cache, else measured now, in 20 s)",
    )
    validate.add_argument(
        "--no-calibrate", action="store_true",
        help="do not measure this machine at its first use; then times of CPU ranks are not "
             "judged",
    )
    validate.add_argument(
        "--launch", metavar="'srun … {worker}'", default=None,
        help="start ranks by a cluster's launcher: a command with {worker}, and perhaps {nodes}, "
             "{ranks_per_node}, {ranks}. Results go to --save, a folder that all nodes see; what "
             "is there already is not run again",
    )
    validate.add_argument(
        "--queue-timeout", type=arguments.seconds, default=86_400.0, metavar="S",
        help="seconds that --launch waits in the cluster's queue for the first rank to start "
             "(default a day); --timeout begins after that",
    )
    validate.add_argument(
        "--trace", metavar="FILE", type=arguments.path, default=None,
        help="write predicted and measured step into one trace for Perfetto or Chrome (.json or "
             ".json.gz); with several scenarios a folder",
    )
    validate.add_argument(
        "--junit", metavar="FILE.xml", type=arguments.path, default=None,
        help="write the verdicts as JUnit's XML, for CI",
    )
    validate.add_argument(
        "--testbed", metavar="4x1gbit", type=arguments.layout, default=None,
        help="run gloo's ranks in hosts on a shaped network: HOSTSxRATE, "
             "NODESxHOSTSxRATE/UPLINK, then ,HOST=RATE for a slow link",
    )
    validate.add_argument(
        "--compute", choices=("real", "emulated"), default="real",
        help="emulated: in timed steps forward and backward are timers of the predicted length",
    )
    _how(validate)
    compare = commands.add_parser("compare", help="compare two saved Runs", allow_abbrev=False)
    compare.add_argument("predicted", type=arguments.path, metavar="RUN_A.json")
    compare.add_argument("measured", type=arguments.path, metavar="RUN_B.json")
    _require(compare)
    arguments.verbose_option(compare)
    arguments.json_option(compare)
    show = commands.add_parser(
        "show", help="the mesh, its routes, the Program and the memory of a scenario",
        allow_abbrev=False,
    )
    show.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
    show.add_argument("--program", action="store_true", help="the Program, one line per op")
    show.add_argument("--memory", action="store_true", help="whether it fits, what lives at the "
                                                            "peak, what would help")
    show.add_argument("--time", action="store_true", help="where the time goes, why "
                                                          "communication is exposed, what would "
                                                          "hide it")
    show.add_argument(
        "--snapshot", metavar="FILE", type=arguments.path,
        help="write the allocator's history for PyTorch's memory visualiser",
    )
    _module(show)
    _allocator(show)
    arguments.json_option(show)
    fit = commands.add_parser("fit", help="compare every strategy, with and without activation "
                                          "checkpointing", allow_abbrev=False)
    fit.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
    _module(fit)
    _allocator(fit)
    arguments.json_option(fit)
    plan = commands.add_parser(
        "plan", help="the way to train a model: strategy, micro-batch and number of GPUs",
        allow_abbrev=False,
    )
    plan.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
    plan.add_argument(
        "--nodes", type=arguments.counts, default=(), metavar="1,2,4",
        help="numbers of nodes to try (default: the scenario's)",
    )
    plan.add_argument(
        "--micro-batch", type=arguments.counts, default=(), metavar="1,2,4",
        help="micro-batches to try (default: powers of two)",
    )
    plan.add_argument(
        "--global-batch", type=arguments.count, default=None, metavar="N",
        help="sequences of a step over all ranks, which accumulation fills (default: the "
             "scenario's)",
    )
    plan.add_argument(
        "--tokens", type=arguments.number, default=None, metavar="1e12",
        help="tokens to train on: days and GPU hours are told",
    )
    plan.add_argument(
        "--days", type=arguments.number, default=None, metavar="D",
        help="days that --tokens may take; what is slower is left out",
    )
    plan.add_argument(
        "--price", type=arguments.number, default=None, metavar="P", help="of one GPU for an hour"
    )
    plan.add_argument(
        "--budget", type=arguments.number, default=None, metavar="M",
        help="money that --tokens may take at --price; what is dearer is left out",
    )
    plan.add_argument(
        "--vary", action="append", default=[], metavar="KEY=V1,V2",
        help="values of any other key of the scenario to try, as wrapping.every=1,2; repeatable",
    )
    plan.add_argument(
        "--goal", choices=("fastest", "cheapest", "smallest"), default="fastest",
        help="least time (default), fewest GPU hours, or fewest GPUs",
    )
    plan.add_argument(
        "--all", action="store_true", help="every other candidate too, with the reason against it"
    )
    plan.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default=None,
        help="write the scenario to take",
    )
    arguments.json_option(plan)
    sweep = commands.add_parser(
        "sweep", help="a scenario at every combination of values, as a table", allow_abbrev=False
    )
    sweep.add_argument(
        "file", type=arguments.path, metavar="SWEEP.toml",
        help='scenario = "FILE.toml", and [axes] with lists: batch.micro_batch = [1, 2, 4]',
    )
    sweep.add_argument(
        "-o", "--out", metavar="FILE", type=arguments.path, default=None,
        help="write the table (.csv, .jsonl, .parquet); an interrupted sweep into the same file "
             "goes on where it stopped",
    )
    sweep.add_argument(
        "--on", default="loky", metavar="loky",
        help="who computes: loky (processes here, default), here (this process), "
             "dask[:ADDRESS], ray[:ADDRESS]",
    )
    sweep.add_argument(
        "--workers", type=arguments.count, default=None, metavar="N",
        help="workers here (default: one for each core)",
    )
    sweep.add_argument(
        "--plot", metavar="FILE.svg", type=arguments.path, default=None,
        help="draw tokens/s against needed memory (.svg, .png, .pdf)",
    )
    arguments.json_option(sweep)
    page = commands.add_parser(
        "report", help="one HTML page to look at: timeline, memory, traffic, trade-off",
        allow_abbrev=False,
    )
    page.add_argument(
        "inputs", nargs="+", type=arguments.path, metavar="SCENARIO|RUN.json",
        help="scenario files or folders, simulated; saved Runs; side by side",
    )
    page.add_argument(
        "-o", "--out", metavar="FILE.html", type=arguments.path, required=True,
        help="the page to write; it needs no network and no other file",
    )
    arguments.json_option(page)
    accuracy = commands.add_parser("accuracy", help="predict published measurements, and print "
                                                    "the errors", allow_abbrev=False)
    accuracy.add_argument(
        "folder", type=arguments.path, metavar="FOLDER",
        help="a folder of measurements: tables (zsim/calibration/README.md), nccl-tests' logs, "
             "saved Runs; or one file",
    )
    accuracy.add_argument(
        "--plot", metavar="FILE.svg", type=arguments.path, help="draw predicted against measured"
    )
    accuracy.add_argument("--explain", metavar="FILE:LINE", help="the scenario that a row is, "
                                                                 "and what it assumes")
    accuracy.add_argument(
        "--collective", choices=COLLECTIVES,
        help="the collective of nccl-tests' logs that do not say it",
    )
    accuracy.add_argument(
        "--cluster", metavar="PRESET", help="on which cluster logs of nccl-tests ran"
    )
    _runs_scenarios(accuracy)
    arguments.json_option(accuracy)
    calibrate = commands.add_parser("calibrate", help="fit constants to measurements, and write "
                                                      "a cluster file", allow_abbrev=False)
    calibrate.add_argument(
        "--from",
        dest="files",
        nargs="+",
        action="extend",
        default=[],
        type=arguments.path,
        metavar="FILE",
        help="tables, nccl-tests' text or JSON, saved Runs",
    )
    _runs_scenarios(calibrate)
    calibrate.add_argument(
        "--here", action="store_true",
        help="measure this machine: steps and collectives with ranks at work, or its GPUs' kernels "
             "and collectives (about 2 minutes)",
    )
    calibrate.add_argument(
        "--world-size", type=arguments.world_size, default=None, metavar="N",
        help="ranks at work while --here measures (default 2, of nccl all GPUs)",
    )
    calibrate.add_argument(
        "--quick", action="store_true", help="measure less: --here in about 20 s"
    )
    calibrate.add_argument(
        "--backend", default=None, metavar="BACKEND",
        help="what --here measures: gloo, this machine's CPU (default), or nccl, its GPUs"
    )
    calibrate.add_argument(
        "--cluster", default="", metavar="PRESET",
        help="the preset that --out begins with (default: that of all steps, else dgx-h100; of "
             "GPUs, the node that they are sold in)",
    )
    calibrate.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path,
        help="write the cluster with the fitted constants",
    )
    arguments.json_option(calibrate)
    file_commands.add(commands)
    lint = commands.add_parser(
        "lint", help="what a scenario does that you may not want, and what it costs",
        allow_abbrev=False,
    )
    _scenarios(lint)
    lint.add_argument(
        "--ignore", type=arguments.names, default=(), metavar="RULE,…",
        help="rules not to ask; in a scenario lint = { ignore = [\"RULE\"] }",
    )
    _module(lint)
    checkpoint = commands.add_parser(
        "checkpoint", help="files of a scenario's checkpoint, time and memory to save and load it",
        allow_abbrev=False,
    )
    checkpoint.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
    checkpoint.add_argument(
        "--to-ranks", type=arguments.some_ranks, default=None, metavar="M",
        help="load it on so many ranks (default: those that save it)",
    )
    arguments.json_option(checkpoint)
    explain = commands.add_parser(
        "explain", help="why a job hung, from its ranks' NCCL flight recorders",
        allow_abbrev=False,
    )
    explain.add_argument(
        "dumps", nargs="+", type=arguments.path, metavar="DUMP",
        help="JSON of the flight recorder, one file of each rank, as rank_3.json; or folders",
    )
    arguments.json_option(explain)
    listing = commands.add_parser(
        "list", help="list scenarios, models, clusters, strategies, backends", allow_abbrev=False
    )
    listing.add_argument(
        "what", nargs="?", choices=LISTS, metavar="|".join(LISTS),
        help="a single list, or the JSON Schema of scenario files (default: all lists)",
    )
    arguments.json_option(listing)
    for name, command in top.commands().items():
        command.epilog = f"example: {EXAMPLES[name]}"
    return top


def _scenarios(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "scenarios", nargs="+", type=arguments.path, metavar="SCENARIO",
        help="scenario files, or folders of them",
    )
    arguments.json_option(command)


def _runs_scenarios(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--scenarios", metavar="FOLDER", type=arguments.path,
        help="folder with the scenarios of saved Runs",
    )


def _allocator(command: argparse.ArgumentParser) -> None:
    what = "the caching allocator as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    command.add_argument("--expandable-segments", action="store_true", help=what)


def _require(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--require", type=arguments.aspects, default=(), metavar="time,…",
        help=f"fail where one of these was not checked: {', '.join(ASPECTS)}",
    )


def _how(command: argparse.ArgumentParser) -> None:
    arguments.verbose_option(command)
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
        help="where ranks run: fake on a CPU (default) or a GPU, gloo on CPUs, nccl on GPUs",
    )
    _module(command)
    command.add_argument(
        "--numerics", choices=NUMERICS_MODES, default=None,
        help="the ranks that train a single-process reference of the whole model: all (full), the "
             "first (sampled), none (default: as many as memory and --timeout allow)",
    )
    command.add_argument(
        "--timeout", type=arguments.seconds, default=120.0, metavar="S",
        help="seconds until a rank counts as hung (default 120)",
    )


def _module(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--module", metavar="PACKAGE.MODULE:FUNCTION", default=None,
        help="your own nn.Module in place of the scenario's model: a function that returns a dict "
             "with module and inputs, and perhaps loss and units. It is imported and called",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    atexit.register(gc.freeze)  # else Python's last collections search all objects, for 50 ms
    with guarded(), terminable():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    if not (sys.argv[1:] if argv is None else argv):
        parser().print_help()
        return 0
    try:
        options = arguments.read(parser(), argv)
    except SystemExit as error:  # --help
        return int(error.code or 0)
    except arguments.ArgumentsError as error:
        return _say(error, as_json="--json" in (sys.argv[1:] if argv is None else argv))
    try:
        with uncollected():
            from zsim.cli import commands  # start-up: `zsim --help` needs none of it

        code = commands.COMMANDS[options.command](options)
        sys.stdout.flush()
    except ZsimError as error:
        return _say(error, as_json=options.json)
    except MemoryError:
        lack = LackError(
            where="this machine", expected="enough memory", found="none left",
            remedy="free some, or ask for less",
        )
        return _say(lack, as_json=options.json)
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
