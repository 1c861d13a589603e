"""What nccl-tests prints. A log that was cut, and one that does not say what it ran, is refused."""

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
"""What the lines begin with that a run begins with."""


def read_text(text: str, *, source: str, collective: str = "") -> Rows:
    """Rows of what nccl-tests printed, run by run, with out-of-place times.

    A run is of the collective that it names; `collective` and the file's name say that of one that
    does not, and must not contradict it. A run without its closing summary was cut, and its last
    row may be too: none of it is used.
    """
    given = LogOrigin(source=source, collective=collective)
    read = [_read_run(lines, first, given) for first, lines in _runs(plain(text).splitlines())]
    return Rows(
        rows=tuple(row for one in read for row in one.rows),
        skipped=tuple(skip for one in read for skip in one.skipped),
    )


def _runs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each run, and how many stand before them: one begins behind a summary, or where
    a run is started anew.

    Behind a summary a command that runs a program is that of the next run, which says no other
    collective where nccl-tests is old.
    """
    begin, is_over, has_body = 0, False, False
    starts_at = [place for place, line in enumerate(lines) if line.startswith(STARTS)]
    last = starts_at[-1] if starts_at else 0
    for place, line in enumerate(lines):
        starts = line.startswith(STARTS) or (
            is_over and place < last and not line.startswith("#") and bool(programs(line))
        )
        if (starts and has_body) or (is_over and (starts or is_row(line))):
            yield begin, lines[begin:place]
            begin, is_over, has_body = place, False, False
        is_over = is_over or line.startswith("# Avg bus bandwidth")
        has_body = has_body or re.match(r"#\s+Rank\b", line) is not None or is_row(line)
    yield begin, lines[begin:]


def _table(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """The rows of a run, and behind its header also what is none and holds what a row does; each
    with its line in the file."""
    is_behind = False
    for place, line in enumerate(lines, start=first + 1):
        is_header = line.startswith("#") and "(GB/s)" in line
        if is_row(line) or (is_behind and not is_header and holds_row(line)):
            yield place, line
        is_behind = is_behind or is_header


@dataclass(frozen=True, slots=True)
class _About:
    collective: str
    is_named: bool
    """Whether the run itself says its collective."""
    contradiction: str
    """Why it is of no one collective, "" where it is."""
    gpu: str
    ranks: int
    nodes: int
    version: str
    mixed: str
    """What is wrong with its GPUs, "" for nothing."""
    variables: tuple[tuple[str, str], ...]
    split: str
    """What is wrong with its communicators, "" for nothing."""
    incomplete: str
    """What is wrong with the list of its ranks, "" for nothing."""
    header: log_headers.Header


def _about(text: str, given: LogOrigin) -> _About:
    ranks = re.findall(
        r"#\s+Rank\s+(\d{1,7}) .*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.*)", text
    )
    devices, header = [(host, gpu) for _, host, gpu in ranks], log_headers.of_text(text)
    version = re.search(r"NCCL version (\d+\.\d+(?:\.\d+)?)", text)
    code = re.search(r"nccl-library=(\d{1,9})(?!\d)", text)
    said = said_by(text)
    name, contradiction = agreed(
        said, given=given.collective, source=given.source, modelled=FACTORS
    )
    return _About(
        collective=name,
        is_named=bool(said),
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
class _Run:
    """The `lines` of one run, of which so many stand before them: its rows with their places, their
    columns, and what it says of itself."""

    lines: Sequence[str]
    first: int
    rows: Sequence[tuple[int, list[str]]]
    columns: log_tables.Table
    about: _About

    @property
    def units(self) -> str:
        """The line of the header that has them."""
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

    def row(self, cells: list[str], place: int, given: LogOrigin) -> LogRow:
        """The row in line `place`; RefusedError with what is wrong with it."""
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
                assumed=about.header.assumed, line=place,
            ),
            timed,
            given,
        )


def _read_run(lines: list[str], first: int, given: LogOrigin) -> Rows:
    rows = [(place, line.split()) for place, line in _table(lines, first)]
    run = _Run(
        lines=lines, first=first, rows=rows, columns=log_tables.table_of(lines),
        about=_about("\n".join(lines), given),
    )
    if reason := next(filter(None, run.problems()), ""):
        last = first + len(lines)
        whole = Skipped(
            source=given.source, line=last, reason=reason, first=first + 1, last=last,
            count=max(1, len(rows)),
        )
        return Rows(skipped=(whole,))
    return collect(
        ((place, partial(run.row, cells, place, given)) for place, cells in rows), given.source
    )
