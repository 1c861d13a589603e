"""`zsim plan`: the way to train a model, on how many GPUs, and why not another."""

from __future__ import annotations

import argparse
from pathlib import Path

from zsim.analysis.planner import GOALS, plan_for
from zsim.cli import arguments, outputs, shared_options, terminal
from zsim.cli.inputs import load_one
from zsim.io import files

EXAMPLE = "zsim plan mine.toml --nodes 1,2,4 --tokens 1e12 --days 30 -o best.toml"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `zsim plan`."""
    command.add_argument("scenario", type=arguments.path, metavar="SCENARIO")
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
    shared_options.json_option(command)


def run(options: argparse.Namespace) -> int:
    """`zsim plan`: 0 where a way fits, 1 where none does."""
    scenario = load_one(options.scenario)
    out = Path(options.out) if options.out else None
    if out:
        outputs.require(out, option="-o", apart_from=[Path(options.scenario)])
    plan = plan_for(
        scenario, nodes=options.nodes, micro_batches=options.micro_batch,
        global_batch=options.global_batch, tokens=options.tokens, days=options.days,
        price=options.price, budget=options.budget, goal=options.goal,
        vary=arguments.axes(options.vary),
        say=lambda text: terminal.tell(f"{scenario.name}: {text}"),
    )
    if options.json:
        terminal.write_json(plan.to_dict())
    else:
        terminal.say_table(str(plan), most=100)
        for name, reason in plan.reasons if options.all else ():
            terminal.say_wrapped(f"   {name}: {reason}", most=100)
    if out and plan.recommended:
        files.write(out, plan.recommended.to_toml())
        terminal.wrote(out, "; zsim run simulates it")
    return 0 if plan.recommended else 1
