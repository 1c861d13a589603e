"""`zsim checkpoint`: files of a scenario's checkpoint, time and memory to save and to load it.

It also tells the best interval, and who reads what on another number of ranks."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zsim.analysis.checkpoints.checkpoint import CheckpointReport, checkpoint
from zsim.analysis.checkpoints.conversion import Conversion
from zsim.analysis.checkpoints.files.file_reads import FileRead
from zsim.analysis.checkpoints.files.folder import CheckpointFolder, check_folder
from zsim.analysis.checkpoints.phase import CheckpointPhase
from zsim.analysis.checkpoints.schedule import CheckpointSchedule, schedule_of
from zsim.cli import terminal
from zsim.cli.inputs import load_one, warned
from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.run import SCHEMA_VERSION

MOST_SHARE = 0.9999
"""Share of lost time up to which it is told."""
MOST_ROWS = 8
"""Most files, and most ranks that read, that a table has."""
LEAST_PART = 1000
"""Part of a rank's reads that a file must have more than one of, to be told in a table."""


def run(options: argparse.Namespace) -> int:
    """`zsim checkpoint`: 0; CheckpointMemoryError where it is OOM, CheckpointFolderError for a
    folder without a whole checkpoint of the scenario. Both exit with 1."""
    scenario = load_one(options.scenario)
    warned(scenario)
    with terminal.progress(f"{scenario.name}: saved and loaded"):
        made = checkpoint(scenario, to_ranks=options.to_ranks)
        schedule = schedule_of(made)
        folder = None if options.folder is None else check_folder(
            scenario, made.files, Path(options.folder)
        )
    if schedule.warning:
        terminal.warn(scenario.name, [schedule.warning])
    if options.json:
        terminal.write_json(_object(made, schedule, folder))
        return 0
    form = scenario.checkpoint.format
    head = (
        f"{scenario.name}: {form} checkpoint of {counted(scenario.world_size, 'rank')} of "
        f"{scenario.cluster.name}"
    )
    rows = list(_rows(made, schedule))
    if options.to_ranks is not None:
        rows += _reads(made.reads)
    if folder is not None:
        rows.append(("folder", str(folder)))
    terminal.table(head, rows)
    return 0


def _rows(made: CheckpointReport, schedule: CheckpointSchedule) -> Iterator[tuple[str, str]]:
    yield "files", f"{counted(len(made.files), 'file')}, {format_bytes(made.nbytes)}"
    for file in made.files[:MOST_ROWS]:
        yield "", f"{file.name} {format_bytes(file.nbytes)}"
    if len(made.files) > MOST_ROWS:
        yield "", "…"
    yield "save", _time(made.save)
    yield "", _memory(made.save)
    if made.conversion is not None:
        yield from _conversion(made.conversion)
    yield "load", f"{_time(made.load)}, by {counted(len(made.reads), 'rank')}"
    yield "", _memory(made.load)
    if schedule.every_ns is not None and schedule.saving_share is not None:
        yield "every", f"{format_time(schedule.every_ns)}: saving takes {schedule.saving_share:.2%}"
    if schedule.best is not None:
        young = f"{format_time(schedule.best.young_ns)} (Young), "
        yield "best interval", (
            f"{young if schedule.best.young_holds else ''}{format_time(schedule.best.daly_ns)} "
            "(Daly)"
        )
        if not schedule.best.young_holds:
            yield "", (
                "Young's formula holds for saves up to a hundredth of the time between failures"
            )
    if schedule.losses is not None and not schedule.losses.makes_progress:
        yield "failures", (
            f"the job makes no progress: saving and failures take "
            f"{min(schedule.losses.share, MOST_SHARE):.2%} of all time or more"
        )
    elif schedule.losses is not None:
        yield "a failure", (
            f"loses {format_time(schedule.losses.by_failure_ns)} on average; saving and failures "
            f"take {schedule.losses.share:.2%} of all time"
        )


def _conversion(made: Conversion) -> Iterator[tuple[str, str]]:
    times = [(phase.time.ns, *phase.time.band_ns) for phase in made.phases]
    whole, low, high = (format_time(sum(own)) for own in zip(*times, strict=True))
    extracting, merging = (phase.program.mesh.world_size for phase in made.phases[:2])
    yield "convert", f"{whole} ({low} to {high}), by {extracting} processes, then {merging}"
    most = max((phase.memory for phase in made.phases), key=lambda memory: memory.node_host_bytes)
    yield "", f"host {format_bytes(most.node_host_bytes)} {most.on_host}"
    read, written = (format_bytes(made.moved_bytes(each)) for each in ("read", "write"))
    yield "", f"reads {read}, writes {written}; all files {format_bytes(made.files_bytes)}"


def _time(phase: CheckpointPhase) -> str:
    time = phase.time
    low, high = map(format_time, time.band_ns)
    text = f"{format_time(time.ns)} ({low} to {high})"
    if time.blocking_ns < time.ns:
        text += f", of which training waits {format_time(time.blocking_ns)}"
    return text


def _memory(phase: CheckpointPhase) -> str:
    memory = phase.memory
    return (
        f"device {format_bytes(memory.device_bytes)} {memory.on_device}, host "
        f"{format_bytes(memory.host_bytes)} of a rank, {format_bytes(memory.node_host_bytes)} of a "
        f"node {memory.on_host}"
    )


def _reads(reads: Sequence[Sequence[FileRead]]) -> Iterator[tuple[str, str]]:
    """A row for each rank; files of which it reads next to nothing, as step counters, are left out.
    """
    for rank, own in enumerate(reads[:MOST_ROWS]):
        nbytes = _by_file(own)
        least = sum(nbytes.values()) / LEAST_PART
        read = [f"file {file} {format_bytes(n)}" for file, n in sorted(nbytes.items()) if n > least]
        if len(read) > MOST_ROWS:
            read = [f"{counted(len(nbytes), 'file')}, {format_bytes(sum(nbytes.values()))}"]
        yield "reads" if rank == 0 else "", f"rank {rank}: {', '.join(read) or 'nothing'}"
    if len(reads) > MOST_ROWS:
        yield "", "…"


def _by_file(own: Sequence[FileRead]) -> Counter[int]:
    nbytes: Counter[int] = Counter()
    for read in own:
        nbytes[read.file] += read.nbytes
    return nbytes


def _object(
    made: CheckpointReport, schedule: CheckpointSchedule, folder: CheckpointFolder | None
) -> dict[str, Any]:
    best, lost = schedule.best, schedule.losses
    return {
        "schema_version": SCHEMA_VERSION, "scenario": made.scenario.name,
        "format": made.scenario.checkpoint.format,
        "asynchronous": made.scenario.checkpoint.asynchronous,
        "bytes": made.nbytes,
        "files": [
            {"name": file.name, "rank": file.rank, "bytes": file.nbytes,
             "tensors": len(file.tensors)}
            for file in made.files
        ],
        "folder": folder and asdict(folder),
        "save": _phase_object(made.save), "load": _phase_object(made.load),
        "conversion": made.conversion and {
            "phases": [_phase_object(phase) for phase in made.conversion.phases],
            "read_bytes": made.conversion.moved_bytes("read"),
            "written_bytes": made.conversion.moved_bytes("write"),
            "files_bytes": made.conversion.files_bytes,
        },
        "reads": [
            {"rank": rank, "file": file, "bytes": nbytes,
             "used_bytes": sum(read.used for read in own if read.file == file)}
            for rank, own in enumerate(made.reads)
            for file, nbytes in sorted(_by_file(own).items())
        ],
        "every_ns": schedule.every_ns, "waiting_ns": schedule.waiting_ns,
        "saving_share": schedule.saving_share,
        "best_interval_ns": best and {"young": best.young_ns, "daly": best.daly_ns},
        "lost_by_failure_ns": lost and lost.by_failure_ns, "lost_share": lost and lost.share,
        "warnings": [schedule.warning] if schedule.warning else [],
    }


def _phase_object(phase: CheckpointPhase) -> dict[str, Any]:
    time, memory = phase.time, phase.memory
    return {
        "time_ns": time.ns, "time_band_ns": list(time.band_ns), "blocking_ns": time.blocking_ns,
        "blocking_band_ns": list(time.blocking_band_ns),
        "peak_device_bytes": memory.device_bytes, "peak_host_bytes": memory.host_bytes,
        "peak_node_host_bytes": memory.node_host_bytes,
        "device_verdict": memory.on_device, "host_verdict": memory.on_host,
    }
