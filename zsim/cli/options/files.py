"""Options of commands that turn other tools' files into zsim's, and back."""

from __future__ import annotations

import argparse

from zsim.cli import arguments
from zsim.cli.options import answers, shared
from zsim.configs.exporters import EXPORTERS
from zsim.configs.importers import IMPORTERS
from zsim.errors import listed


def export(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim export`."""
    command.add_argument("kind", choices=tuple(EXPORTERS), help="the tool; fully_shard is Python")
    shared.scenario_option(command)
    command.add_argument(
        "-o", "--out", metavar="FILE", type=arguments.path, default=None,
        help="the file to write (default: print it); chakra writes one file per rank: this is "
             "their prefix",
    )
    shared.json_option(command)


def import_config(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim import`."""
    command.add_argument(
        "files", nargs="+", type=arguments.path, metavar="[KIND] FILE",
        help=f"a config ({listed(IMPORTERS)}; without KIND, its content tells); or kineto and "
             "one trace of torch's profiler for each rank",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.toml", type=arguments.path, default=None,
        help="write the scenario (default: print it)",
    )
    answers.add_answers(command)
    command.add_argument(
        "--drop", type=arguments.names, default=(), metavar="KEY,…",
        help="keys of the config to leave out",
    )
    command.add_argument(
        "--recipe", metavar="NAME", default="",
        help="function that makes a torchtitan Python config",
    )
    command.add_argument(
        "--scenario", metavar="SCENARIO", type=arguments.path, default=None,
        help="scenario of a kineto trace, for mesh and units",
    )
    command.add_argument(
        "--save", metavar="RUN.json", type=arguments.path, default=None,
        help="write the Run of a kineto trace, for `zsim compare`",
    )
    shared.json_option(command)


def trace(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim trace`."""
    command.add_argument(
        "module", metavar="mymodel:MyModel|hf:config.json",
        help="a class or function without arguments, which is imported and called; or a config "
             "whose module transformers makes",
    )
    command.add_argument(
        "--input", metavar="[NAME=]2x2048:int64", action="append", default=[], dest="inputs",
        help="shape and dtype (default int64) of an input of forward, one for each; for a "
             "config.json, the token ids. B and S as sizes stand for --micro-batch and "
             "--sequence-length: BxS:int64",
    )
    command.add_argument(
        "--micro-batch", metavar="1,2,4", type=arguments.counts, default=(),
        help="sizes of B in the inputs: one file for all of them, which sweep and plan may vary",
    )
    command.add_argument(
        "--sequence-length", metavar="2048,4096", type=arguments.counts, default=(),
        help="sizes of S in the inputs",
    )
    command.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default=None,
        help="dtype of the parameters (default: their own)",
    )
    command.add_argument(
        "--autocast", choices=("bf16", "fp16"), default=None,
        help="dtype of torch.autocast around forward and loss (default: no autocast)",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda",
        help="the devices whose kernels it has (default cuda); none is needed here",
    )
    command.add_argument(
        "--units", metavar="layers.*,…", type=arguments.names, default=None,
        help="modules that are gathered together each, by fqn, or none for the whole model at once "
             "(default: the children of the longest ModuleList)",
    )
    command.add_argument(
        "--checkpointing", action="store_true",
        help="trace the blocks recomputed as well, so that a scenario may ask for it",
    )
    command.add_argument(
        "-o", "--out", metavar="MODEL.json", type=arguments.path, required=True,
        help="the file to write, which scenarios name: model = { traced = \"MODEL.json\" }",
    )
    shared.json_option(command)
