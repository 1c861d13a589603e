"""Text output of nccl-tests since its version 2.11. A log that was cut is skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.logged_run import ListedDevice, LoggedRun, Result
from zsim.calibration.nccl_tests.variables import listed
from zsim.calibration.records import Skipped

STARTS = re.compile(
    r"^# (?:nccl-tests version|Collective test starting|nThread \d+)", re.MULTILINE
)
"""Beginnings of the lines with which a run begins."""
COLUMNS = ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
"""Columns that are read; those of results in place may follow."""
_PROGRAM = re.compile(r"^# Collective test starting: *(?:\S*/)?(\w{1,60}?)(?:_perf)?$")
_DEVICE = re.compile(
    r"#\s+Rank\s+(\d{1,7}) (?:Group\s+(\d{1,7}) )?.*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.+)"
)


def read_text(text: str, *, source: str, collective: str = "") -> list[LogRow | Skipped]:
    """Rows of what nccl-tests printed, run by run, with out-of-place times.

    A variable that one of its runs names counts for all. A run without its closing summary was cut,
    and its last row may be too: none of it is used.
    """
    variables = listed(text)
    runs = (_run(lines, first, source, variables) for first, lines in _runs(text.splitlines()))
    return [row for run in runs for row in run.rows(source=source, collective=collective)]


def _runs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each run, and the number of the first."""
    begin, has_body = 0, False
    for index, line in enumerate(lines):
        if has_body and STARTS.match(line):
            yield begin + 1, lines[begin:index]
            begin, has_body = index, False
        has_body = has_body or _DEVICE.match(line) is not None
    yield begin + 1, lines[begin:]


def _run(lines: list[str], first: int, source: str, variables: tuple[str, ...]) -> LoggedRun:
    header = [line for line in lines if line.startswith("#")]
    results: list[Result] = []
    skipped: list[Skipped] = []
    for number, line in enumerate(lines, start=first):
        if re.match(r"\s*\d", line):
            try:
                results.append(_result(line.split(), number))
            except ValueError as error:
                reason = f"expected a row of nccl-tests, found one of {error}"
                skipped.append(Skipped(source=source, line=number, reason=reason))
    programs = [match[1] for line in header if (match := _PROGRAM.match(line))]
    matches = filter(None, map(_DEVICE.match, header))
    launches = next((line for line in header if line.startswith("# nThread")), "")
    return LoggedRun(
        first=first, last=first + len(lines) - 1, program=programs[0] if programs else "",
        devices=tuple(
            ListedDevice(rank=int(match[1]), group=int(match[2] or 0), host=match[3],
                         gpu=match[4].strip())
            for match in matches
        ),
        results=tuple(results), skipped=tuple(skipped), variables=variables,
        is_blocking=any(line.startswith("# Blocking Enabled") for line in header),
        grouped=_number(launches, "agg iters:", 1), graphs=_number(launches, "graph:", 0),
        problem=next(_problems(header), ""),
    )


def _problems(header: Sequence[str]) -> Iterator[str]:
    if not any(line.startswith("# Avg bus bandwidth") for line in header):
        yield "log cut: no closing summary"
    if any(re.match(r"# Out of bounds values : .*FAILED", line) for line in header):
        yield "wrong results: out of bounds values"
    if not any(line[1:].split()[: len(COLUMNS)] == COLUMNS for line in header):
        yield f"expected the columns that nccl-tests prints since 2.11, {' '.join(COLUMNS)}"
    units = next((line for line in header if "(GB/s)" in line), "none")
    if "(B)" not in units or "(us)" not in units:
        yield f"expected sizes in B and times in us, found {units.strip('# ')[:60]}"


def _number(line: str, label: str, default: int) -> int:
    match = re.search(rf"\b{label} (\d{{1,9}})\b", line)
    return int(match[1]) if match else default


def _result(cells: list[str], line: int) -> Result:
    """The result of a row's cells; ValueError for others."""
    if len(cells) not in (9, 13):
        raise ValueError(f"{len(cells)} fields in place of 9 or 13")
    return Result(
        line=line, nbytes=int(cells[0]), count=int(cells[1]), dtype=cells[2], operation=cells[3],
        microseconds=float(cells[5]), bus=float(cells[7]),
    )
