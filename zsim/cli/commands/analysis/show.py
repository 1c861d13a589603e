"""The command show: a scenario's Program, memory and time."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zsim.analysis import advice, assessed
from zsim.cli import outputs, terminal
from zsim.cli.inputs import load_with_options, read, warned
from zsim.cli.reports import memory_report, program_report
from zsim.engine.events.deadlock_report import LostLinkError
from zsim.ir.run import SCHEMA_VERSION
from zsim.memory import fits, full_device, non_torch, waterfall
from zsim.memory.allocator import reserved
from zsim.runs.figures.step_time import step_time
from zsim.scenario.checks.work_limits import MANY_TIMES
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.cluster.routes import GroupRoutes


def run(options: argparse.Namespace) -> int:
    """`zsim show`: the mesh, and the Program or the memory when asked for; `--snapshot` writes the
    allocator's history."""
    scenario = load_with_options(options)
    case = planned(scenario)
    program = case.program
    head = program_report.show_head(scenario, program)
    warnings = warned(scenario)
    answer = fits.assess(case)
    case, released = full_device.with_calls(case, answer), assessed.released_ns(case, answer)
    stages = waterfall.waterfall(scenario, answer)
    helps = _advice(case, answer) if options.memory else None
    nothing_fits = "" if helps is None else advice.none_fits(answer, helps)
    if options.snapshot:
        taken = read([options.scenario], scenario)
        outputs.require(
            Path(options.snapshot), option="--snapshot", apart_from=taken, kind="a snapshot"
        )
        from zsim.memory.allocator import snapshot  # start-up: few write one

        rank = program.of_rank(answer.rank)
        made = snapshot.snapshot(
            rank if answer.built_on_device else reserved.built_elsewhere(rank),
            expandable_segments=scenario.expandable_segments,
            workspace_bytes=_workspace(scenario), empty_cache=True,
        )
        snapshot.write_snapshot(made, Path(options.snapshot))
        terminal.wrote(options.snapshot)
    if options.json:
        more: dict[str, object] = {"program": str(program).splitlines()} if options.program else {}
        more |= {"warnings": list(warnings)} if warnings else {}
        if options.memory:
            more |= memory_report.answer_object(
                answer, stages, program.of_rank(answer.rank), released_ns=released
            )
            more["what_would_help"] = [
                asdict(effect) | {"finding": memory_report.finding(effect)}
                for effect in helps or ()
            ]
            more["nothing_fits"] = nothing_fits or None
        if options.time:
            from zsim.cli.reports import time_report  # start-up: it explains and plans again

            more["time"] = time_report.as_object(case)
        if not options.memory:
            more |= {"routes": [asdict(way) for way in _routes(case)]}
        terminal.write_json({"schema_version": SCHEMA_VERSION, **head, **more})
        return 0
    rows = [(name, text) for name, text in list(head.items())[1:] if text]
    if not options.memory:
        after_mesh = 1 + [name for name, _ in rows].index("mesh")
        rows[after_mesh:after_mesh] = program_report.route_rows(_routes(case))
    needs = memory_report.verdict_words(answer, released)
    terminal.table(scenario.name, [*rows, ("memory", f"{answer.verdict}: {needs}")])
    if options.program:
        terminal.say(str(program))
    if options.memory:
        memory_report.print_answer(
            answer, stages, program.of_rank(answer.rank), released_ns=released
        )
        if helps is not None:
            memory_report.print_advice(helps, nothing_fits)
    if options.time:
        from zsim.cli.reports import time_report  # start-up: as above

        time_report.show(case)
    return 0


def _routes(case: Planned) -> tuple[GroupRoutes, ...]:
    """The routes of the groups over which the steady step communicates, in the order of issue."""
    groups = dict.fromkeys(op.group for op in case.program.ranks[0].steady if op.group)
    if not groups:
        return ()
    from zsim.cluster import routes  # networkx takes 60 ms, which few commands need

    return routes.routes(case.scenario.cluster, case.program.mesh, groups)


def _advice(case: Planned, answer: fits.MemoryVerdict) -> tuple[advice.Effect, ...] | None:
    """Changes that would lower the peak; None, and a warning, where that would take minutes or
    the step never ends.

    `answer` is the verdict on the scenario as it is.
    """
    scenario = case.scenario
    if untried := scenario.work.problem(part=MANY_TIMES):
        terminal.warn(
            scenario.name, [f"changes are not simulated: it would take minutes: {untried}"]
        )
        return None
    with terminal.progress(f"{scenario.name}: every change planned and simulated"):
        try:
            step = step_time(case)
        except LostLinkError as error:  # memory needs no clock
            terminal.warn(scenario.name, [f"changes are not simulated: {error}"])
            return None
        return advice.advice(
            advice.Way(
                changes=(), scenario=scenario, memory=answer, step=step, program=case.program
            )
        )


def _workspace(scenario: Scenario) -> int:
    return (
        non_torch.cublas_workspace(scenario.cluster.device)
        if scenario.cluster.kind == "cuda"
        else 0
    )
