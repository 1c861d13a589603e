"""Runs and comparisons for people and for programs: tables, or one JSON object.

It reads Runs, checks and figures. It knows no engine and decides no verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from zsim.cli.arguments import with_options
from zsim.cli.terminal import one_line, say, say_wrapped, table, write_json
from zsim.errors import ZsimError, visible
from zsim.io.units import counted, format_bytes, format_time, rounded_sizes
from zsim.ir.run import SCHEMA_VERSION, OffDevice
from zsim.runs.comparison import Comparison
from zsim.runs.figures import metrics
from zsim.runs.run import Run
from zsim.runs.unended import UnendedRun

MOST_LATE = 4
"""Most ranks that a table names of those that come late."""
WORDS = {True: "ok", False: "FAILED", None: "-"}


def print_runs(
    runs: Sequence[Run | UnendedRun], failures: Sequence[tuple[str, ZsimError]], *, as_json: bool,
    several: bool, exact: bool = False,
) -> None:
    """Every Run's figures and expectations, with bytes where they are to be `exact`; as JSON also
    what could not be run."""
    if as_json:
        objects = [run.to_dict() for run in runs]
        errors: dict[str, Any] = {"errors": _errors(failures)} if failures else {}
        write_json(
            {"schema_version": SCHEMA_VERSION, "runs": objects} | errors if several else objects[0]
        )
        return
    for run in runs:
        if isinstance(run, UnendedRun):
            say(f"{run.scenario.name} on {run.backend}, {counted(run.scenario.world_size, 'rank')}")
            say(f"  the step does not end: {run.error}")
        else:
            interpreter, ranks = run.record.interpreter, counted(run.world_size, "rank")
            head = f"{run.record.scenario} on {run.backend} ({interpreter}), {ranks}"
            table(head, list(_figure_rows(run, exact=exact)))
        for verdict in run.expectations:
            actual = verdict.actual if exact else rounded_sizes(verdict.actual)
            say_wrapped(
                f"  {WORDS[verdict.ok]:6} {verdict.name}: {verdict.expected}, found {actual}",
                hanging=9,
            )


def step_words(step_ns: int, band: tuple[int, int] | None, known: str) -> str:
    """The step time, between which times it is expected, and what is `known` of the machine."""
    between = (
        f"{format_time(band[0])} to {format_time(band[1])}, " if band and band[0] < band[1] else ""
    )
    return f"{format_time(step_ns)} ({between}{known})"


def _figure_rows(run: Run, *, exact: bool) -> Iterator[tuple[str, str]]:
    figures = run.figures

    def sized(nbytes: int) -> str:
        return f"{format_bytes(nbytes)}{f' ({nbytes:,} B)' if exact and nbytes >= 2**20 else ''}"

    if run.device_memory is not None:
        allocated = format_bytes(figures.peak_memory_bytes)
        yield "memory", f"{run.device_memory} (torch allocates {allocated})"
        if times := run.device_memory.releases_per_step:
            yield "  gives cached memory back", (
                f"{counted(times, 'time')} a steady step, which takes "
                f"{format_time(run.device_memory.released_ns)} of it"
            )
    if figures.step_time_ns is not None:
        known = run.record.provenance.get("calibration", "measured")
        name = "step time with faults" if run.faults else "step time"
        yield name, step_words(figures.step_time_ns, figures.step_time_band_ns, known)
    if run.record.provenance.get("detail") == "steps":
        others = run.record.provenance.get("closed_form", "")
        yield "  rings as steps", f"but for {others}" if others else "all collectives"
    yield from (("  fault", fault) for fault in run.faults)
    for late in run.late[:MOST_LATE]:
        yield "  held up by", (
            f"rank {late.rank}, last at {late.last_at} of {counted(late.collectives, 'collective')}"
            f", for {format_time(late.held_up_ns)}"
        )
    alone = run.world_size == 1 and not figures.collectives
    if figures.exposed_communication_ns is not None and not alone:
        recorded = max((rank.recorded_step_ns or 0 for rank in run.record.ranks), default=0)
        step = f"recorded step of {format_time(recorded)}" if recorded else "step"
        share = (
            f" ({100 * figures.exposed_share:.1f} % of the {step})"
            if figures.exposed_share is not None
            else ""
        )
        yield "exposed communication", format_time(figures.exposed_communication_ns) + share
    if figures.off_device is not None:
        yield from _off_device_rows(figures.off_device, figures.step_time_ns, sized)
    if figures.mfu is not None:
        yield (
            "MFU",
            f"{100 * figures.mfu:.1f} % (PaLM's FLOPs: all scores of attention, also where it is "
            f"causal)",
        )
    if figures.hfu is not None:
        yield "HFU", f"{100 * figures.hfu:.1f} % (FLOPs that are done, recomputation included)"
    if figures.tokens_per_second_per_gpu is not None:
        yield "tokens/s per rank", f"{figures.tokens_per_second_per_gpu:,.0f}"
    for kind, traffic in figures.collectives.items():
        yield kind.replace("_", "-"), f"{traffic.count} of {sized(traffic.bytes)} in all"
    if figures.bytes_sent_per_rank is not None and not alone:
        yield "sent per rank", sized(figures.bytes_sent_per_rank)
    peak = figures.peak_memory_bytes
    room = "" if run.device_memory is not None else _room(figures)
    yield "peak memory", f"{sized(peak)}{room}"
    for kind, nbytes in figures.peak_memory_by_kind.items():
        if nbytes:
            yield f"  {kind}", sized(nbytes)
    for part, highest in figures.peak_memory_by_part.items():
        yield f"peak in {part}", sized(highest)
    yield "peak of first step", sized(figures.peak_first_step_bytes)
    if allocator := run.record.provenance.get("allocator"):
        yield "allocator", allocator


def _off_device_rows(
    work: OffDevice, step_ns: int | None, sized: Callable[[int], str]
) -> Iterator[tuple[str, str]]:
    """Waits of a step for work off the device, the longest first, and bytes of its drives."""
    waits = sorted(
        ((work.drives_ns, "drives"), (work.copies_ns, "copies over PCIe"),
         (work.host_ns, "the optimizer on the host")), key=lambda wait: -wait[0],
    )
    if named := [f"{format_time(ns)} for {name}{_share(ns, step_ns)}" for ns, name in waits if ns]:
        yield "compute waits", ", ".join(named)
    if work.read_bytes or work.written_bytes:
        yield "drives per rank", (
            f"{sized(work.read_bytes)} read, {sized(work.written_bytes)} written in a step"
        )


def _share(ns: int, step_ns: int | None) -> str:
    return f" ({100 * ns / step_ns:.1f} % of the step)" if step_ns else ""


def _room(figures: metrics.Figures) -> str:
    """The device's memory against the peak of torch's own allocations, as the end of a sentence."""
    if figures.device_memory_bytes is None:
        return ""
    fits = "of" if figures.peak_memory_bytes <= figures.device_memory_bytes else "DOES NOT FIT in"
    return f", {fits} the device's {format_bytes(figures.device_memory_bytes)}"


def print_checks(comparison: Comparison, *, exact: bool = False) -> None:
    """Every check of one scenario, and the verdict; sizes are bytes where they are to be `exact`.
    """
    for line in str(comparison).splitlines():
        say_wrapped(line if exact else rounded_sizes(line), hanging=29)
    sys.stdout.flush()


def _errors(failures: Sequence[tuple[str, ZsimError]]) -> list[dict[str, Any]]:
    return [
        {"scenario": name, "error": with_options(error), "exit_code": error.exit_code}
        for name, error in failures
    ]


def print_failure(scenario: str, error: ZsimError) -> None:
    """A scenario that could not be run, on standard error."""
    sys.stderr.write(f"zsim: {one_line(scenario)}: {with_options(error)}\n")
    sys.stderr.write(f"{visible(error.details)}\n" if error.details else "")


def write_checks(
    comparisons: Sequence[Comparison], failures: Sequence[tuple[str, ZsimError]], *, several: bool
) -> None:
    """The checks as JSON: of one scenario its object, of several a list of them and of those that
    could not be run."""
    objects = [comparison.to_dict() for comparison in comparisons]
    errors = _errors(failures)
    ok = not failures and all(comparison.ok for comparison in comparisons)
    whole = {"schema_version": SCHEMA_VERSION, "validations": objects, "errors": errors, "ok": ok}
    write_json(whole if several else objects[0])
