"""Text output of nccl-tests. A log that was cut, or that names no collective, is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from zsim.calibration.nccl_tests import log_headers, log_tables
from zsim.calibration.nccl_tests.checks import (
    FACTORS,
    LogOrigin,
    RanRow,
    RefusedError,
    Rows,
    checked,
    collect,
)
from zsim.calibration.nccl_tests.collective_names import agreed, programs, said_by
from zsim.calibration.nccl_tests.log_lines import holds_row, is_row, why_no_row, why_not_its_count
from zsim.calibration.nccl_tests.log_prefixes import plain
from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.variables import listed
from zsim.calibration.records import DAMAGED, NUL, Skipped

OUT_OF_BOUNDS = re.compile(r"# Out of bounds values : .*FAILED")
STARTS = ("# nccl-tests version", "# Collective test starting", "# nThread")
"""Beginnings of the lines with which a run begins."""


def read_text(text: str, *, source: str, collective: str = "") -> Rows:
    """Rows of what nccl-tests printed, run by run, with out-of-place times.

    A run is of the collective that it names. For a run that names none, `collective` and the file's
    name do; neither may contradict the run. A run without its closing summary was cut, and its last
    row may be too: none of it is used.
    """
    origin = LogOrigin(source=source, collective=collective)
    read = [_read_run(lines, first, origin) for first, lines in _runs(plain(text).splitlines())]
    return Rows(
        rows=tuple(row for run in read for row in run.rows),
        skipped=tuple(skip for run in read for skip in run.skipped),
    )


def _runs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each run, and their number of lines before: a run begins behind a summary, or at
    a line of `STARTS`.

    A command behind a summary belongs to the next run, whose collective an old nccl-tests names
    nowhere else.
    """
    begin, is_over, has_body = 0, False, False
    starts_at = [index for index, line in enumerate(lines) if line.startswith(STARTS)]
    last = starts_at[-1] if starts_at else 0
    for index, line in enumerate(lines):
        starts = line.startswith(STARTS) or (
            is_over and index < last and not line.startswith("#") and bool(programs(line))
        )
        if (starts and has_body) or (is_over and (starts or is_row(line))):
            yield begin, lines[begin:index]
            begin, is_over, has_body = index, False, False
        is_over = is_over or line.startswith("# Avg bus bandwidth")
        has_body = has_body or re.match(r"#\s+Rank\b", line) is not None or is_row(line)
    yield begin, lines[begin:]


def _table(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """The rows of a run, each with its line in the file.

    Behind the header they include damaged rows, which hold a row's contents in another shape.
    """
    is_behind = False
    for number, line in enumerate(lines, start=first + 1):
        is_header = line.startswith("#") and "(GB/s)" in line
        if is_row(line) or (is_behind and not is_header and holds_row(line)):
            yield number, line
        is_behind = is_behind or is_header


@dataclass(frozen=True, slots=True)
class _About:
    collective: str
    is_named: bool
    """True where the run itself names its collective."""
    contradiction: str
    """Reason why its collective is not known, "" where it is."""
    gpu: str
    ranks: int
    nodes: int
    version: str
    mixed: str
    """Problem of its GPUs, "" for none."""
    variables: tuple[tuple[str, str], ...]
    split: str
    """Problem of its communicators, "" for none."""
    incomplete: str
    """Problem of the list of its ranks, "" for none."""
    header: log_headers.Header


def _about(text: str, origin: LogOrigin) -> _About:
    ranks = re.findall(
        r"#\s+Rank\s+(\d{1,7}) .*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.*)", text
    )
    devices, header = [(host, gpu) for _, host, gpu in ranks], log_headers.of_text(text)
    version = re.search(r"NCCL version (\d+\.\d+(?:\.\d+)?)", text)
    code = re.search(r"nccl-library=(\d{1,9})(?!\d)", text)
    named = said_by(text)
    name, contradiction = agreed(
        named, option=origin.collective, source=origin.source, modelled=FACTORS
    )
    return _About(
        collective=name,
        is_named=bool(named),
        contradiction=contradiction,
        gpu=devices[0][1].strip() if devices else "",
        ranks=len(devices),
        nodes=len({host for host, _ in devices}),
        version=version[1] if version else log_headers.version(int(code[1])) if code else "",
        mixed=log_headers.mixed(name.strip() for _, name in devices),
        variables=listed(text),
        split=log_headers.split(re.findall(r"#\s+Rank\s+\d{1,7} Group\s+(\d{1,7})\b", text)),
        incomplete=header.incomplete([int(rank) for rank, _, _ in ranks]),
        header=header,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextRun:
    """The `lines` of one run, and the number of lines before them: its rows by line, their columns,
    and its header."""

    lines: Sequence[str]
    first: int
    rows: Sequence[tuple[int, list[str]]]
    columns: log_tables.LogTable
    about: _About

    @property
    def units(self) -> str:
        """Line of the header with the units."""
        return next((line for line in self.lines if line.startswith("#") and "(GB/s)" in line), "")

    def problems(self) -> Iterator[str]:
        """Reasons why none of it can be used."""
        about, wrong = self.about, log_tables.WRONG
        if not any(line.startswith("# Avg bus bandwidth") for line in self.lines):
            yield "log cut: no closing summary"
        if any(NUL in line for line in self.lines if line.startswith("#")):
            yield f"what it says of its run is {DAMAGED}"
        if "(us)" not in self.units:
            yield "no time in us"
        if "cputime" in self.columns.names:
            yield log_headers.OF_HOST
        yield from (about.header.mistimed, about.split, self.columns.problem)
        blamed = any(self.columns.why_wrong(cells) == wrong for _, cells in self.rows)
        if any(OUT_OF_BOUNDS.match(line) for line in self.lines) and not blamed:
            yield f"{wrong}: out of bounds values"
        unit = "".join(re.findall(r"\(([^)]*)\)", self.units)[:1]).strip()
        if unit not in ("B", "bytes"):
            yield f"sizes in another unit than B: {unit[:20] or 'none'}"
        yield about.contradiction
        if not about.ranks:
            yield "no devices listed"
        yield about.incomplete
        yield about.mixed
        if not self.rows:
            yield "no rows"

    def row(self, cells: list[str], number: int, origin: LogOrigin) -> LogRow:
        """The row in line `number`; RefusedError with its problem."""
        about, name = self.about, self.about.collective
        if problem := why_no_row(cells, columns=len(self.columns.names)) or why_not_its_count(
            name, cells, ranks=about.ranks
        ):
            raise RefusedError(problem)
        timed = self.columns.timed(cells, name)
        contradiction = (
            self.columns.why_not_called if about.is_named else self.columns.why_not_of
        )(name, cells)
        if problem := self.columns.why_wrong(cells) or contradiction:
            raise RefusedError(problem)
        return checked(
            RanRow(
                op=name, gpu=about.gpu, num_ranks=about.ranks, num_nodes=about.nodes,
                nbytes=int(cells[0]), version=about.version, variables=about.variables,
                assumed=about.header.assumed, line=number,
            ),
            timed,
            origin,
        )


def _read_run(lines: list[str], first: int, origin: LogOrigin) -> Rows:
    rows = [(number, line.split()) for number, line in _table(lines, first)]
    run = _TextRun(
        lines=lines, first=first, rows=rows, columns=log_tables.table_of(lines),
        about=_about("\n".join(lines), origin),
    )
    if reason := next(filter(None, run.problems()), ""):
        last = first + len(lines)
        whole = Skipped(
            source=origin.source, line=last, reason=reason, first=first + 1, last=last,
            count=max(1, len(rows)),
        )
        return Rows(skipped=(whole,))
    return collect(
        ((number, partial(run.row, cells, number, origin)) for number, cells in rows), origin.source
    )
