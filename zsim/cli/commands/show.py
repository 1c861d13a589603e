"""The commands show, fit and list: a scenario's Program, memory and time, candidates that fit it,
and the names of presets."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.resources import files as files_of
from pathlib import Path
from typing import TYPE_CHECKING

from zsim import api
from zsim.analysis import advice
from zsim.cli import terminal
from zsim.cli.inputs import load_one, read, warned
from zsim.cli.reports import memory_report, program_report
from zsim.engine.simulate import LostLinkError
from zsim.errors import ScenarioError, shown
from zsim.io import files
from zsim.ir.run import SCHEMA_VERSION
from zsim.memory import fits, non_torch, waterfall
from zsim.memory.allocator import full_device, reserved
from zsim.runs import registry, simulator
from zsim.runs.backend import RunOptions
from zsim.scenario.keys import schema
from zsim.scenario.plan import Planned, planned
from zsim.scenario.scenario import Scenario, load
from zsim.scenario.work_limits import MANY_TIMES

if TYPE_CHECKING:
    from zsim.cluster.routes import GroupRoutes


def show(options: argparse.Namespace) -> int:
    """`zsim show`: the mesh, and the Program or the memory when asked for; `--snapshot` writes the
    allocator's history."""
    scenario = _loaded(options)
    case = planned(scenario)
    program = case.program
    head = program_report.show_head(scenario, program)
    warnings = warned(scenario)
    answer = fits.assess(case)
    case, released = full_device.with_calls(case, answer), api.released_ns(case, answer)
    stages = waterfall.waterfall(scenario, answer)
    helps = _advice(case, answer) if options.memory else None
    nothing_fits = "" if helps is None else advice.none_fits(answer, helps)
    if options.snapshot:
        taken = read([options.scenario], scenario)
        files.require(
            Path(options.snapshot), option="--snapshot", apart_from=taken, kind="a snapshot"
        )
        from zsim.memory.allocator import snapshot  # start-up: few write one

        rank = program.of_rank(answer.rank)
        snapshot.write_snapshot(
            rank if answer.built_on_device else reserved.built_elsewhere(rank),
            Path(options.snapshot),
            expandable_segments=scenario.expandable_segments,
            workspace_bytes=_workspace(scenario),
            empty_cache=True,
        )
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
        terminal.warn(scenario.name, [f"what would help is not computed, to be done in seconds: "
                                    f"{untried}"])
        return None
    with terminal.progress(f"{scenario.name}: every change planned and simulated"):
        try:
            step = simulator.step_time(case)
        except LostLinkError as error:  # memory needs no clock
            terminal.warn(scenario.name, [f"what would help is not computed: {error}"])
            return None
        return advice.advice(
            advice.Way(
                changes=(), scenario=scenario, memory=answer, step=step, program=case.program
            )
        )


def _loaded(options: argparse.Namespace) -> Scenario:
    """The scenario with what the command line says of its model and of the allocator."""
    simulated = RunOptions(module=options.module)
    scenario = api.of_module(registry.SimBackend(), load_one(options.scenario), simulated)
    return scenario.with_parts(
        expandable_segments=scenario.expandable_segments or options.expandable_segments
    )


def _workspace(scenario: Scenario) -> int:
    return (
        non_torch.cublas_workspace(scenario.cluster.device)
        if scenario.cluster.kind == "cuda"
        else 0
    )


def least(options: argparse.Namespace) -> int:
    """`zsim fit`: 0 when something fits."""
    scenario = _loaded(options)
    with terminal.progress(f"{scenario.name}: every stage on {scenario.cluster.name}"):
        fitted = api.fit(scenario, say=lambda text: terminal.tell(f"{scenario.name}: {text}"))
    memory_report.print_fit(fitted, as_json=options.json)
    return 0 if fitted.recommended is not None else 1


def listing(options: argparse.Namespace) -> int:
    """`zsim list`: names, one per line, with a word on each; without a name of a list, all."""
    if options.what == "schema":
        terminal.write_json(schema.json_schema())
        return 0
    chosen = [options.what] if options.what else list(LISTINGS)
    lists = {what: list(LISTINGS[what]()) for what in chosen}
    if not options.json and "scenarios" in lists:
        head = f"{_shipped()}{os.sep}"
        if any(name.startswith(head) for name, _ in lists["scenarios"]):
            rows = [(name.removeprefix(head), about) for name, about in lists.pop("scenarios")]
            lists = {f"scenarios, in {head.rstrip(os.sep)}": rows, **lists}
    terminal.print_lists(lists, as_json=options.json)
    return 0


Row = tuple[str, str]


def _shipped() -> Path:
    """The folder of the scenarios that come with zsim."""
    return Path(str(files_of("zsim") / "presets" / "scenarios")).resolve()


def _scenarios() -> Iterator[Row]:
    """Files of the folder scenarios where there is one, else those that come with zsim."""
    folder = Path("scenarios") if any(Path("scenarios").rglob("*.toml")) else _shipped()
    for path in sorted(folder.rglob("*.toml")):
        try:
            yield str(path), load(path).description
        except ScenarioError as error:
            yield str(path), f"not usable: {error.problems[0]}"


def _models() -> Iterator[Row]:
    from zsim.models import families  # only `zsim list models` needs the sources

    for name in families.presets():
        preset, spec = families.preset(name), families.load_preset(name)
        at = (
            f" at a sequence length of {families.LISTED_LENGTH:,}, whose positions are learned"
            if preset.has_open_positions
            else ""
        )
        yield name, f"{spec.num_parameters:,} parameters{at}; {preset.source}"


def _clusters() -> Iterator[Row]:
    from zsim.cluster import cluster

    for name in cluster.clusters():
        yield name, cluster.load_cluster(name).description


def _devices() -> Iterator[Row]:
    from zsim.cluster.devices import devices, load_device

    for name in devices():
        device = load_device(name)
        node = f", in {device.node}" if device.node else ""
        if device.runtime is not None:  # a core of a CPU is no device to choose
            yield name, f"{device.name}, {device.bfloat16 / 1e12:,.0f} TFLOP/s in bf16{node}"


def _strategies() -> Iterator[Row]:
    from zsim.scenario.keys.schema import strategy_table
    from zsim.strategies import STRATEGIES

    for name in STRATEGIES:
        yield name, ", ".join(
            key if field.default is None else f"{key} = {shown(field.default)}"
            for key, field in strategy_table(name).model_fields.items() if key != "name"
        )


def _backends() -> Iterator[Row]:
    yield from registry.names().items()


LISTINGS: dict[str, Callable[[], Iterator[Row]]] = {
    "scenarios": _scenarios,
    "models": _models,
    "clusters": _clusters,
    "devices": _devices,
    "strategies": _strategies,
    "backends": _backends,
}
