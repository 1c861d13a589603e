"""Results for people and for programs: one JSON object on standard output, or tables; progress goes
to standard error.

It reads Runs, checks and figures. It knows no engine and decides no verdict.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from shutil import get_terminal_size
from textwrap import wrap
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from zsim.cli.arguments import with_options
from zsim.errors import ZsimError, visible
from zsim.io.units import counted, format_bytes, format_rate, format_time, rounded_sizes
from zsim.ir.program import Program
from zsim.ir.run import SCHEMA_VERSION
from zsim.runs import metrics
from zsim.runs.run import Comparison, Run
from zsim.runs.unended import UnendedRun
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.cluster.routes import GroupRoutes

Thing = TypeVar("Thing")

TELL_EVERY_S = 10.0
"""Seconds between lines of progress in a file or a pipe."""
MOST_LATE = 4
"""Most ranks that a table names of those that come late."""
COLOURS = {"FITS": 32, "TIGHT": 33, "OOM": 31, "FAILED": 31, "DIFFERS": 31, "BROKEN": 31}
"""Numbers of a terminal's colours, by the verdicts that have one: green, yellow, red."""
_VERDICT = re.compile(rf"\b(?:{'|'.join(COLOURS)})\b")
WORDS = {True: "ok", False: "FAILED", None: "-"}


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show `what` on standard error while the work inside goes on, on a terminal only."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"{_line(what)} …\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\033[K")


def tell(text: str) -> None:
    """Print the progress of long work on standard error, on a terminal only; the next line
    overwrites it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\033[K{_line(text)}\r")
        sys.stderr.flush()


def telling(head: str) -> Callable[[str], None]:
    """A function like `tell`, with `head` before each text; where standard error is no terminal it
    prints a line every ten seconds."""
    told_at = monotonic()

    def told(text: str) -> None:
        nonlocal told_at
        if sys.stderr.isatty():
            tell(f"{head}{text}")
        elif monotonic() - told_at >= TELL_EVERY_S:
            told_at = monotonic()
            sys.stderr.write(f"{_line(head + text)}\n")
            sys.stderr.flush()

    return told


def countdown(things: Sequence[Thing]) -> Iterator[tuple[str, Thing]]:
    """Each of many things, with the words before its progress: its number, and the time left."""
    begin = monotonic()
    for number, thing in enumerate(things):
        left = (monotonic() - begin) / number * (len(things) - number) if number else 0.0
        time_left = f", {left:,.0f} s left" if number else ""
        yield (f"{number + 1} of {len(things)}{time_left}: " if len(things) > 1 else ""), thing


def warn(name: str, warnings: Sequence[str]) -> None:
    """Print warnings about the scenario `name` on standard error."""
    for text in warnings:
        sys.stderr.write(f"warning: {_line(name)}: {_line(text)}\n")


def note(text: str) -> None:
    """Print on standard error what is no error."""
    sys.stderr.write(f"note: {_line(text)}\n")


def wrote(path: object, hint: str = "") -> None:
    """Print on standard error that a result is in the file at `path`."""
    sys.stderr.write(f"wrote {_line(str(path))}{hint}\n")


def _line(text: str) -> str:
    """A name or a sentence of a scenario, a file or a backend, in one line."""
    return visible(text).replace("\n", "?").replace("\t", " ")


def write_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def say(text: str) -> None:
    """A line for people, on standard output; what a terminal would obey instead of showing it is a
    ? there."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = visible(text).encode(encoding, errors="replace").decode(encoding)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        shown = _VERDICT.sub(lambda match: f"\033[{COLOURS[match[0]]}m{match[0]}\033[0m", shown)
    sys.stdout.write(shown + "\n")


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
    if figures.exposed_communication_ns is not None:
        recorded = max((rank.recorded_step_ns or 0 for rank in run.record.ranks), default=0)
        step = f"recorded step of {format_time(recorded)}" if recorded else "step"
        share = (
            f" ({100 * figures.exposed_share:.1f} % of the {step})"
            if figures.exposed_share is not None
            else ""
        )
        yield "exposed communication", format_time(figures.exposed_communication_ns) + share
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
    if figures.bytes_sent_per_rank is not None:
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
    sys.stderr.write(f"zsim: {_line(scenario)}: {with_options(error)}\n")
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


def show_head(scenario: Scenario, program: Program) -> dict[str, str]:
    """The head of `zsim show`: name, model, cluster, mesh, strategy and rank programs."""
    model = scenario.model
    allocator = {"allocator": "expandable_segments:True"} if scenario.expandable_segments else {}
    return {
        "scenario": scenario.name,
        "description": scenario.description,
        "model": f"{model.name}, {model.num_parameters:,} parameters, {len(model.units)} units",
        "cluster": f"{scenario.cluster.name}, {counted(scenario.cluster.num_ranks, 'rank')}",
        "mesh": str(program.mesh).removeprefix("mesh "),
        "strategy": f"{scenario.strategy}{_options(scenario)}",
        "rank programs": f"{len(program.ranks)} distinct, {len(program.ranks[0].steady):,} ops in "
                         f"rank 0's steady step",
        **allocator,
    }


def route_rows(ways: Sequence[GroupRoutes]) -> list[tuple[str, str]]:
    """Rows with the hops of each group that communicates: the links, the narrowest, and its time.
    """
    rows: list[tuple[str, str]] = []
    for way in ways:
        for hop in way.hops:
            ring = (
                f" (ring {format_rate(way.ring_bytes_per_s)})"
                if hop is way.hops[-1] and way.ring_bytes_per_s != hop.bytes_per_s
                else ""
            )
            link = f"{hop.narrowest} {format_rate(hop.bytes_per_s)}{ring}"
            text = f"{_parts(hop.parts)}, {link}, {format_time(hop.latency_ns)}"
            rows.append((f"  {way.group}" if hop is way.hops[0] else "", text))
    return rows


def _parts(parts: Sequence[str]) -> str:
    """The parts of a route, a node by name only where it is another than that before."""
    told, node = [], "node0"
    for part in parts:
        own, _, name = part.rpartition(".")
        told.append(name if own in ("", node) else part)
        node = own or node
    return " → ".join(told)


def _options(scenario: Scenario) -> str:
    return "".join(
        f", {option.name} = {getattr(scenario.options, option.name)}"
        for option in fields(scenario.options)
    )


def bar() -> str:
    """The character of bars, in the terminal's encoding."""
    try:
        "▇".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "▇"


def print_lists(lists: Mapping[str, Sequence[tuple[str, str]]], *, as_json: bool) -> None:
    """Lists by what they list: names with a word on each."""
    if as_json:
        write_json({
            what: [{"name": name, "about": about} for name, about in rows]
            for what, rows in lists.items()
        })
        return
    for what, rows in lists.items():
        if rows:
            table(what, rows)


def table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns. On a terminal values are wrapped to its width, and a name
    that is long has a line of its own: none is cut."""
    title, rows = _line(title), [(_line(name), _line(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    columns = line_width()
    say_wrapped(title, hanging=2)
    for name, value in rows:
        if not columns or 2 * width <= columns:
            say_wrapped(f"  {name:{width}}  {value}", hanging=width + 4)
        else:
            say(f"  {name}")
            say_wrapped(f"      {value}", hanging=6)


def line_width() -> int:
    """Columns of the terminal, or of COLUMNS where that is set; 0 of a file or a pipe."""
    told = os.environ.get("COLUMNS", "").isdigit()
    return get_terminal_size().columns if told or sys.stdout.isatty() else 0


def say_wrapped(text: str, *, hanging: int = 6, most: int = 0) -> None:
    """`text` in lines as wide as the terminal, and at most `most` columns; those after the first
    are indented by `hanging`. No name is cut."""
    width = min(filter(None, (line_width(), most)), default=0)
    if not width or len(text) <= width:
        say(text)
        return
    for line in wrap(
        text, max(width, hanging + 20), subsequent_indent=" " * hanging, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    ):
        say(line)
