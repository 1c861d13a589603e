"""Golden files: a Program or a Run as text beside its test, and the difference from it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from zsim.errors import ArgumentError, ZsimError
from zsim.io import files
from zsim.io.arguments import described
from zsim.io.units import format_time
from zsim.ir.program import Program
from zsim.runs.run import Run
from zsim.testing.explanations import SIMULATOR

MOST_LINES = 60
"""Lines of a difference that a report shows."""


def golden_text(value: object) -> str:
    """The text of a Program, a Run or a text itself.

    Times are of simulated Runs only: those of a real Run are other ones each time.
    """
    if isinstance(value, Program):
        return str(value)
    if isinstance(value, Run):
        return "\n".join([*_lines(value), ""])
    if isinstance(value, str):
        return value
    raise ArgumentError(
        where="golden", expected="a Run, a Program or a text", found=described(value)
    )


def _lines(run: Run) -> Iterator[str]:
    record, figures = run.record, run.figures
    yield f"scenario {record.scenario}, {record.provenance.get('fingerprint', 'no fingerprint')}"
    yield f"backend {record.backend} ({record.interpreter}), {record.world_size:,} ranks"
    yield "collectives of a step"
    for kind, traffic in figures.collectives.items():
        yield f"  {kind:<22} {traffic.count:>6,} {traffic.bytes:>20,} B"
    yield f"peak memory, in {run.memory.peak_at or 'an op that is not known'}"
    yield f"  {'in all':<22} {figures.peak_memory_bytes:>27,} B"
    for kind, nbytes in figures.peak_memory_by_kind.items():
        if nbytes:
            yield f"  {kind:<22} {nbytes:>27,} B"
    yield f"  {'in the first step':<22} {figures.peak_first_step_bytes:>27,} B"
    for part, nbytes in figures.peak_memory_by_part.items():
        yield f"  in {part:<19} {nbytes:>27,} B"
    if record.interpreter == SIMULATOR and figures.step_time_ns is not None:
        yield f"step time {format_time(figures.step_time_ns)}"
        yield f"exposed communication {format_time(figures.exposed_communication_ns or 0)}"


def difference(path: Path, text: str, *, update: bool) -> str:
    """The difference of `text` from the golden file, "" for none; with `update` it is written."""
    if update:
        files.write(path, text)
        return ""
    try:
        before = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"no golden file {path}; --zero-update-golden writes it"
    except (OSError, UnicodeDecodeError) as error:
        raise ZsimError(
            where=str(path), expected="a golden file", found=str(error)[:200]
        ) from None
    if before == text:
        return ""
    lines = list(
        difflib.unified_diff(before.splitlines(), text.splitlines(), "golden", "now", lineterm="")
    ) or ["(they differ in the ends of lines)"]
    more = [f"… and {len(lines) - MOST_LINES:,} lines more"] if len(lines) > MOST_LINES else []
    head = f"another text than {path}; --zero-update-golden writes it anew"
    return "\n".join([head, *lines[:MOST_LINES], *more])
