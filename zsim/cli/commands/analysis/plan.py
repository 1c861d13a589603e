"""`zsim plan`: the way to train a model, on how many GPUs, and why not another."""

from __future__ import annotations

import argparse
from pathlib import Path

from zsim.analysis.planner.plan import plan_for
from zsim.cli import arguments, outputs, terminal
from zsim.cli.inputs import load_one, warned
from zsim.io import files


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
    if plan.recommended:
        warned(plan.recommended.scenario)
    if out and plan.recommended:
        files.write(out, plan.recommended.to_toml(folder=out.parent))
        terminal.wrote(out, "; zsim run simulates it")
    return 0 if plan.recommended else 1
