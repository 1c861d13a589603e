"""Results for people and for programs: one JSON object on standard output, or tables; progress goes
to standard error.

It reads Runs, checks and figures. It knows no engine and decides no verdict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from zsim.errors import ZsimError, visible
from zsim.io.units import format_bytes, format_time
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.ir.run import SCHEMA_VERSION, Run, sees
from zsim.runs import metrics
from zsim.runs.compare.check import Check
from zsim.runs.compare.compare import agrees
from zsim.scenario import expect, schema
from zsim.scenario.scenario import Scenario

WORDS = {True: "ok", False: "FAILED", None: "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A Run with its figures and the verdicts on what its scenario expects."""

    run: Run
    figures: metrics.Figures
    verdicts: tuple[expect.Verdict, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every expectation held and the Run reached its end."""
        return self.run.complete and all(verdict.ok is not False for verdict in self.verdicts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The checks of a predicted against a measured Run."""

    checks: tuple[Check, ...]
    predicted: Run
    measured: Run
    replaced: str = ""

    @property
    def ok(self) -> bool:
        """Whether no check failed and some was made."""
        return agrees(self.checks)


def of_run(run: Run, scenario: Scenario, *, warnings: tuple[str, ...] = ()) -> RunReport:
    """The figures of a Run and its verdicts; `warnings` are part of the result."""
    figures = metrics.figures(run, scenario)
    judged = sees(
        run, "time"
    # a time that a real backend measures on a machine that nobody calibrated is told, and holds no
    # one to it
    )
    found: dict[str, expect.Number | None] = {
        "peak_memory": figures.peak_memory_bytes, "peak_first_step": figures.peak_first_step_bytes,
        "bytes_sent_per_rank": figures.bytes_sent_per_rank,
        "step_time": figures.step_time_ns if judged else None,
        "exposed_communication": figures.exposed_share, "mfu": figures.mfu if judged else None,
        **{
            f"{kind}s": figures.collectives.get(kind, metrics.Traffic()).count
            for kind in COLLECTIVES
        },
    }
    verdicts = expect.check(scenario.expect, found=found)
    return RunReport(run=run, figures=figures, verdicts=verdicts, warnings=warnings)


def of_checks(
    checks: tuple[Check, ...], predicted: Run, measured: Run, *, replaced: str = ""
) -> CheckReport:
    """The report on `checks`; `replaced` says what of the scenario's cluster was replaced, if
    anything."""
    return CheckReport(checks=checks, predicted=predicted, measured=measured, replaced=replaced)


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says what is going on, on standard error, while it goes on and only on a terminal."""
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
    """How far long work has come, on standard error and only on a terminal; the next line takes its
    place."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\033[K{text}\r")
        sys.stderr.flush()


def warn(name: str, warnings: Sequence[str]) -> None:
    """What to know about the scenario `name`, on standard error."""
    for text in warnings:
        sys.stderr.write(f"warning: {_line(name)}: {_line(text)}\n")


def _line(text: str) -> str:
    """A name or a sentence that somebody has written, in one line."""
    return visible(text).replace("\n", "?").replace("\t", " ")


def write_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def say(text: str) -> None:
    """A line for people, on standard output; what a terminal would obey instead of showing it is a
    ? there."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(visible(text).encode(encoding, errors="replace").decode(encoding) + "\n")


def print_runs(
    reports: Sequence[RunReport], failures: Sequence[tuple[str, ZsimError]], *, as_json: bool,
    several: bool,
) -> None:
    """Every Run's figures and expectations; as JSON also what could not be run."""
    if as_json:
        objects = [run_object(one) for one in reports]
        errors: dict[str, Any] = {"errors": _errors(failures)} if failures else {}
        write_json(
            {"schema_version": SCHEMA_VERSION, "runs": objects} | errors if several else objects[0]
        )
        return
    for one in reports:
        run = one.run
        head = f"{run.scenario} on {run.backend} ({run.interpreter}), {run.world_size:,} ranks"
        table(head, list(_figure_rows(one)))
        for verdict in one.verdicts:
            say(f"  {WORDS[verdict.ok]:6} {verdict.name}: {verdict.expected}, found "
                f"{verdict.found}")


def step_words(step_ns: int, band: tuple[int, int] | None, known: str) -> str:
    """The step time, between which times it is expected, and what is `known` of the machine."""
    between = (
        f"{format_time(band[0])} to {format_time(band[1])}, " if band and band[0] < band[1] else ""
    )
    return f"{format_time(step_ns)} ({between}{known})"


def _figure_rows(one: RunReport) -> Iterator[tuple[str, str]]:
    figures = one.figures
    if figures.step_time_ns is not None:
        known = one.run.provenance.get("calibration", "measured")
        yield "step time", step_words(figures.step_time_ns, figures.step_time_band_ns, known)
    if figures.exposed_communication_ns is not None:
        share = (
            f" ({100 * figures.exposed_share:.1f} % of the step)"
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
    if figures.tokens_per_second_per_gpu is not None:
        yield "tokens/s per rank", f"{figures.tokens_per_second_per_gpu:,.0f}"
    for kind, traffic in figures.collectives.items():
        yield kind.replace("_", "-"), f"{traffic.count} of {traffic.bytes:,} B in all"
    if figures.bytes_sent_per_rank is not None:
        yield "sent per rank", f"{figures.bytes_sent_per_rank:,} B"
    peak = figures.peak_memory_bytes
    yield "peak memory", f"{peak:,} B ({format_bytes(peak)}){_room(figures)}"
    for kind, nbytes in figures.peak_memory_by_kind.items():
        if nbytes:
            yield f"  {kind}", f"{nbytes:,} B"
    for part, highest in figures.peak_memory_by_part.items():
        yield f"peak in {part}", f"{highest:,} B"
    yield "peak of first step", f"{figures.peak_first_step_bytes:,} B"
    if allocator := one.run.provenance.get("allocator"):
        yield "allocator", allocator


def _room(figures: metrics.Figures) -> str:
    """Whether the device has as much, as far as torch's own allocations tell."""
    if figures.device_memory_bytes is None:
        return ""
    fits = "of" if figures.peak_memory_bytes <= figures.device_memory_bytes else "DOES NOT FIT in"
    return f", {fits} the device's {format_bytes(figures.device_memory_bytes)}"


def run_object(one: RunReport) -> dict[str, Any]:
    """The object that `zsim run --json` prints for one scenario; its keys are stable."""
    figures = one.figures
    warnings = {"warnings": list(one.warnings)} if one.warnings else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": one.run.scenario,
        "backend": one.run.backend,
        "interpreter": one.run.interpreter,
        "world_size": one.run.world_size,
        "step_time_ns": figures.step_time_ns,
        "step_time_band_ns": list(figures.step_time_band_ns) if figures.step_time_band_ns else None,
        "tokens_per_second_per_gpu": figures.tokens_per_second_per_gpu,
        "mfu": figures.mfu,
        "compute_ns": figures.compute_ns,
        "communication_ns": figures.communication_ns,
        "exposed_communication_ns": figures.exposed_communication_ns,
        "bytes_sent_per_rank": figures.bytes_sent_per_rank,
        "collectives": {kind: asdict(traffic) for kind, traffic in figures.collectives.items()},
        "peak_memory_bytes": figures.peak_memory_bytes,
        "device_memory_bytes": figures.device_memory_bytes,
        "peak_first_step_bytes": figures.peak_first_step_bytes,
        "peak_memory_by_kind": dict(figures.peak_memory_by_kind),
        "peak_memory_by_part": dict(figures.peak_memory_by_part),
        "expectations": [asdict(verdict) for verdict in one.verdicts],
        "ok": one.ok,
        "provenance": dict(one.run.provenance),
        **warnings,
    }


def print_checks(one: CheckReport) -> None:
    """Every check of one scenario, and the verdict."""
    real = f"{one.measured.backend} ({one.measured.interpreter})"
    say(f"{one.measured.scenario}: {one.predicted.backend} against {real}, "
        f"{one.measured.world_size:,} ranks")
    if one.replaced:
        say(f"  {one.replaced}")
    for check in one.checks:
        first, *rest = check.detail.splitlines() or [""]
        status = "FAILED " if check.status == "failed" else ""
        say(f"  {check.name:26} {status}{first}")
        for line in rest:
            say(f"      {line}")
    say(f"  {'agrees' if one.ok else 'DIFFERS'}")
    sys.stdout.flush()


def _errors(failures: Sequence[tuple[str, ZsimError]]) -> list[dict[str, Any]]:
    return [
        {"scenario": name, "error": str(error), "exit_code": error.exit_code}
        for name, error in failures
    ]


def print_failure(scenario: str, error: ZsimError) -> None:
    """A scenario that could not be run, on standard error."""
    sys.stderr.write(f"zsim: {_line(scenario)}: {error}\n")


def write_checks(
    reports: Sequence[CheckReport], failures: Sequence[tuple[str, ZsimError]], *, several: bool
) -> None:
    """The checks as JSON: of one scenario its object, of several a list of them and of those that
    could not be run."""
    objects = [check_object(one) for one in reports]
    errors = _errors(failures)
    ok = not failures and all(one.ok for one in reports)
    whole = {"schema_version": SCHEMA_VERSION, "validations": objects, "errors": errors, "ok": ok}
    write_json(whole if several else objects[0])


def check_object(one: CheckReport) -> dict[str, Any]:
    """The object that `zsim validate --json` and `zsim compare --json` print for one scenario."""
    return {
        "schema_version": SCHEMA_VERSION, "scenario": one.measured.scenario,
        "predicted_backend": one.predicted.backend, "measured_backend": one.measured.backend,
        "interpreter": one.measured.interpreter, "world_size": one.measured.world_size,
        "replaced": one.replaced,
        "checks": [
            {key: _finite(value) for key, value in asdict(check).items()} for check in one.checks
        ],
        "ok": one.ok,
        "provenance": {
            "predicted": dict(one.predicted.provenance), "measured": dict(one.measured.provenance)
        },
    }


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value


def show_head(scenario: Scenario, program: Program) -> dict[str, str]:
    """What `zsim show` says of every scenario."""
    model = scenario.model
    allocator = {"allocator": "expandable_segments:True"} if scenario.expandable_segments else {}
    return {
        "scenario": scenario.name,
        "description": scenario.description,
        "model": f"{model.name}, {model.num_parameters:,} parameters, {len(model.units)} units",
        "cluster": f"{scenario.cluster.name}, {scenario.cluster.num_ranks:,} ranks",
        "mesh": str(program.mesh).removeprefix("mesh "),
        "strategy": f"{scenario.strategy}{_options(scenario)}",
        "rank programs": f"{len(program.ranks)} distinct, {len(program.ranks[0].steady):,} ops in "
                         f"rank 0's steady step",
        **allocator,
    }


def _options(scenario: Scenario) -> str:
    return "".join(
        f", {option.name} = {getattr(scenario.options, option.name)}"
        for option in fields(scenario.options)
    )


def bar() -> str:
    """What bars are drawn with, on whatever the terminal can write."""
    try:
        "▇".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "▇"


def print_list(what: str, rows: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """Names with a word on each; `schema` is the JSON Schema of scenario files."""
    if what == "schema":
        write_json(schema.json_schema())
    elif as_json:
        write_json({what: [{"name": name, "about": about} for name, about in rows]})
    else:
        table(what, rows)


def table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns: with rich on a terminal, aligned plain text elsewhere."""
    title, rows = _line(title), [(_line(name), _line(value)) for name, value in rows]
    if sys.stdout.isatty():
        from rich.console import Console  # only a terminal needs it
        from rich.table import Table
        from rich.text import Text

        drawn = Table("", "", title=Text(title), title_justify="left", show_header=False)
        for name, value in rows:
            drawn.add_row(Text(name), Text(value))
        Console().print(drawn)
        return
    width = max((len(name) for name, _ in rows), default=0)
    say(title)
    for name, value in rows:
        say(f"  {name:{width}}  {value}")
