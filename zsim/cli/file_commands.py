"""Arguments of the commands that make scenarios of other tools' files or of answers. So are those
of diff, doctor and completion."""

from __future__ import annotations

import argparse
from typing import Any

from zsim.cli import arguments

CONFIGS = ("accelerate", "deepspeed", "megatron", "nanotron", "torchtitan", "transformers")
"""Kinds of configs that `zsim import` reads, besides traces."""
EXPORTS = ("accelerate", "chakra", "deepspeed", "fully_shard", "torchtitan")
SHELLS = ("bash", "zsh", "fish")


def add(commands: Any) -> None:
    """Add each command to the parsers of `commands`."""
    _import(commands)
    _export(commands)
    _trace(commands)
    _new(commands)
    _diff(commands)
    doctor = commands.add_parser(
        "doctor", help="what is installed, what can run here, and how to get the rest",
        allow_abbrev=False,
    )
    arguments.json_option(doctor)
    completion = commands.add_parser(
        "completion", help="a script that completes zsim's commands in a shell",
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=SHELLS, help='eval "$(zsim completion bash)"')
    completion.set_defaults(json=False)


def _export(commands: Any) -> None:
    writing = commands.add_parser(
        "export", help="write a scenario as another tool's config", allow_abbrev=False
    )
    writing.add_argument("kind", choices=EXPORTS, help="the tool; fully_shard is Python")
    writing.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
    writing.add_argument(
        "-o", "--out", metavar="FILE", type=arguments.path, default=None,
        help="the file to write (default: print it); of chakra the prefix of a file a rank",
    )
    arguments.json_option(writing)


def _trace(commands: Any) -> None:
    tracing = commands.add_parser(
        "trace", help="make a model of a module of yours, or of any config.json of transformers",
        allow_abbrev=False,
    )
    tracing.add_argument(
        "module", metavar="mymodel:MyModel|hf:config.json",
        help="a class or function without arguments, which is imported and called; or a config "
             "whose module transformers makes",
    )
    tracing.add_argument(
        "--input", metavar="[NAME=]2x2048:int64", action="append", default=[], dest="inputs",
        help="shape and dtype of an input of forward, one for each; of a config.json of tokens. "
             "B and S as sizes stand for --micro-batch and --sequence-length: BxS:int64",
    )
    tracing.add_argument(
        "--micro-batch", metavar="1,2,4", type=arguments.counts, default=(),
        help="sizes of B in the inputs: one file for all of them, which sweep and plan may vary",
    )
    tracing.add_argument(
        "--sequence-length", metavar="2048,4096", type=arguments.counts, default=(),
        help="sizes of S in the inputs",
    )
    tracing.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default=None,
        help="dtype of the parameters (default: their own)",
    )
    tracing.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda",
        help="the devices whose kernels it has (default cuda); none is needed here",
    )
    tracing.add_argument(
        "--checkpointing", action="store_true",
        help="trace the blocks recomputed as well, so that a scenario may ask for it",
    )
    tracing.add_argument(
        "-o", "--out", metavar="MODEL.json", type=arguments.path, required=True,
        help="the file to write, which scenarios name: model = { traced = \"MODEL.json\" }",
    )
    arguments.json_option(tracing)


def _new(commands: Any) -> None:
    new = commands.add_parser(
        "new", help="a scenario to begin with: asks what no option says", allow_abbrev=False
    )
    new.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default="scenario.toml",
        help="the file to write (default scenario.toml)",
    )
    _answers(new)
    new.add_argument(
        "--strategy", metavar="NAME", default=None, help="a strategy of `zsim list strategies`"
    )
    arguments.json_option(new)


def _diff(commands: Any) -> None:
    diff = commands.add_parser(
        "diff", help="two scenarios simulated, figure by figure, for a pull request",
        allow_abbrev=False,
    )
    diff.add_argument("base", type=arguments.path, metavar="BASE.toml")
    diff.add_argument("head", type=arguments.path, metavar="HEAD.toml")
    diff.add_argument(
        "--markdown", metavar="FILE.md", type=arguments.path, default=None,
        help="write the table for a comment",
    )
    diff.add_argument(
        "--junit", metavar="FILE.xml", type=arguments.path, default=None,
        help="write each figure as a test case in JUnit's XML, for CI",
    )
    diff.add_argument(
        "--fail-if", metavar="peak:+2%,step:+5%", default="",
        help="growths that fail; of peak, first_peak, step, exposed, sent, collectives",
    )
    arguments.json_option(diff)


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
        dest="settings",
        help="any other key of the scenario, as optimizer.clip_norm=1.0; or a variable of a shell "
             "script of Megatron's, as NUM_LAYERS=32",
    )
