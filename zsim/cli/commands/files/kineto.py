"""`zsim import`: what other tools recorded, made a Run, and where its time went."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zsim.cli import outputs, terminal
from zsim.cli.inputs import load_one
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import RankRun, RunRecord
from zsim.runs import saved
from zsim.runs.figures import metrics
from zsim.runs.figures.unit_times import time_by_unit
from zsim.runs.kineto import trace_file
from zsim.runs.kineto.to_run import to_run

MOST = 12


def import_traces(options: argparse.Namespace) -> int:
    """`zsim import kineto FILE…`: the Run of the traces, saved, and where its time went."""
    scenario = load_one(options.scenario) if options.scenario else None
    paths = [Path(file) for file in options.files]
    if options.save:
        outputs.require(Path(options.save), option="--save", apart_from=paths, kind="a Run")
    name = scenario.name if scenario else paths[0].name.partition(".")[0]
    run = to_run([trace_file.read(path) for path in paths], name=name, scenario=scenario)
    if options.save:
        saved.save(run, Path(options.save))
        terminal.wrote(options.save)
    if options.json:
        terminal.write_json({"scenario": run.scenario, "ranks": [_told(run, r) for r in run.ranks]})
        return 0
    for rank in run.ranks:
        for line in _lines(run, rank):
            terminal.say(line)
    return 0


def _told(run: RunRecord, rank: RankRun) -> dict[str, object]:
    step_ns = rank.recorded_step_ns or 1
    return {
        "rank": rank.rank, "step_time_ns": rank.step_time_ns, "recorded_step_ns": step_ns,
        "compute_ns": metrics.compute_ns(rank), "communication_ns": metrics.communication_ns(rank),
        "exposed_communication_ns": metrics.exposed_ns(rank),
        "collectives": {
            kind: {"count": traffic.count, "bytes": traffic.bytes}
            for kind, traffic in metrics.traffic(rank).items()
        },
        "time_by_unit_ns": time_by_unit(rank, step_ns),
    }


def _lines(run: RunRecord, rank: RankRun) -> Iterator[str]:
    step_ns = rank.recorded_step_ns or 1
    yield (
        f"{run.scenario}, rank {rank.rank}: step of {format_time(step_ns)}; compute "
        f"{format_time(metrics.compute_ns(rank))}, communication "
        f"{format_time(metrics.communication_ns(rank))}, of it exposed "
        f"{format_time(metrics.exposed_ns(rank))}, {metrics.exposed_ns(rank) / step_ns:.1%}"
    )
    for kind, traffic in metrics.traffic(rank).items():
        took = sum(s.end_ns - s.start_ns for s in rank.spans if s.kind == kind)
        yield f"  {kind:15} {traffic.count:5} of {traffic.bytes:,} B in {format_time(took)}"
    units = time_by_unit(rank, step_ns)
    exposed = Counter(s.unit for s in rank.spans if s.kind in COLLECTIVES)
    for unit, ns in list(units.items())[:MOST]:
        moved = f", {exposed[unit]} collectives" if exposed[unit] else ""
        yield f"  {unit or 'no unit told':24} {format_time(ns):>12} {ns / step_ns:6.1%}{moved}"
    if len(units) > MOST:
        yield f"  … and {len(units) - MOST} more"
