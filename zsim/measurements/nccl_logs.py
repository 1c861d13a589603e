"""What nccl-tests itself writes: its text and its JSON. A log that was cut, and one that does not say what it ran, is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zsim.measurements import nccl_headers, nccl_tables
from zsim.measurements.nccl_checks import FACTORS, RefusedError, Rows, Skipped, Timed, checked, collect, number
from zsim.measurements.nccl_lines import holds_row, is_row, why_no_row, why_not_its_count
from zsim.measurements.nccl_names import agreed, collectives_of, programs, said_by
from zsim.measurements.nccl_prefixes import plain
from zsim.measurements.nccl_rows import NcclRow
from zsim.measurements.nccl_units import size_unit
from zsim.measurements.nccl_words import in_log
from zsim.measurements.table import DAMAGED, NUL

MOST_VARIABLES = 10_000
"""Of an environment that is looked through."""
OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values : .*FAILED", re.MULTILINE)
STARTS = ("# nccl-tests version", "# Collective test starting", "# nThread")
"""What the lines begin with that a run begins with."""


def read_text(
    text: str, *, source: str, collective: str = "", gpu: str = "", inter_node: str = "", notes: str = ""
) -> Rows:
    """What nccl-tests printed, run by run, with out-of-place times. What the text does not say can be given.

    A run is of the collective that it says; `collective` and the file's name say that of one that does not, and must not contradict it.
    Rows of another contradict its bandwidths or their operation. A run without its closing summary was cut, and its last row may be too:
    none of it is used.
    """
    parts = list(_runs(plain(text).splitlines()))
    read = [_read_run(lines, first, source, collective, gpu, inter_node, notes) for first, lines in parts]
    return Rows(rows=tuple(row for one in read for row in one.rows), skipped=tuple(skip for one in read for skip in one.skipped))


def _runs(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of each run, and how many stand before them: one begins behind a summary, or where a run is started anew.

    Behind a summary a command that runs a program is that of the next run, which says no other collective where nccl-tests is old.
    """
    begin, is_over, has_body = 0, False, False
    starts_at = [place for place, line in enumerate(lines) if line.startswith(STARTS)]
    last = starts_at[-1] if starts_at else 0
    for place, line in enumerate(lines):
        starts = line.startswith(STARTS) or (is_over and place < last and not line.startswith("#") and bool(programs(line)))
        if (starts and has_body) or (is_over and (starts or is_row(line))):
            yield begin, lines[begin:place]
            begin, is_over, has_body = place, False, False
        is_over = is_over or line.startswith("# Avg bus bandwidth")
        has_body = has_body or re.match(r"#\s+Rank\b", line) is not None or is_row(line)
    yield begin, lines[begin:]


def _read_run(lines: list[str], first: int, source: str, collective: str, gpu: str, inter_node: str, notes: str) -> Rows:
    text = "\n".join(lines)
    table, columns = [(place, line.split()) for place, line in _table(lines, first)], nccl_tables.table_of(lines)
    about = _about(text)
    words = next((line for line in lines if line.startswith("#") and "(GB/s)" in line), "")
    name, problem_of_name = agreed(about.collectives, given=collective, source=source, modelled=FACTORS)
    problem = ""
    if not any(line.startswith("# Avg bus bandwidth") for line in lines):
        problem = "log cut: no closing summary"
    elif any(NUL in line for line in lines if line.startswith("#")):
        problem = f"what it says of its run is {DAMAGED}"
    elif "(us)" not in words:
        problem = "no time in us"
    elif "cputime" in columns.names:
        problem = nccl_headers.OF_HOST
    elif about.header.mistimed or about.split:
        problem = about.header.mistimed or about.split
    elif columns.problem:
        problem = columns.problem
    elif OUT_OF_BOUNDS.search(text) and not any(columns.why_wrong(cells) == nccl_tables.WRONG for _, cells in table):
        problem = f"{nccl_tables.WRONG}: out of bounds values"
    elif (unit := size_unit(words)) not in ("B", "bytes"):
        problem = f"sizes in another unit than B: {unit[:20] or 'none'}"
    elif problem_of_name:
        problem = problem_of_name
    elif not about.ranks:
        problem = "no devices listed"
    elif about.incomplete:
        problem = about.incomplete
    elif about.mixed and not gpu:
        problem = about.mixed
    if problem or not table:
        reason = problem or "no rows"
        last = first + len(lines)
        whole = Skipped(source=source, line=last, reason=reason, count=max(1, len(table)), first=first + 1, last=last)
        return Rows(rows=(), skipped=(whole,))

    def make(cells: list[str], place: int) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if problem := why_no_row(cells, columns=len(columns.names)) or why_not_its_count(name, cells, ranks=about.ranks):
                raise RefusedError(problem)
            timed = columns.timed(cells, name)
            contradiction = (columns.why_not_called if about.collectives else columns.why_not_of)(name, cells)
            if problem := columns.why_wrong(cells) or contradiction:
                raise RefusedError(problem)
            return checked(
                NcclRow(
                    collective=name,
                    gpu=gpu or about.gpu,
                    n_ranks=about.ranks,
                    n_nodes=about.nodes,
                    size_bytes=int(cells[0]),
                    inter_node=inter_node,
                    nccl_version=about.version,
                    notes=f"{notes} {about.variables}".strip(),
                    assumed=about.header.assumed,
                    source=source,
                    line=place,
                ),
                timed,
            )

        return row

    return collect(((number, make(cells, number)) for number, cells in table), source)


def _table(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """The rows of a run, and behind its header also what is none and holds what a row does; each with its line in the file."""
    is_behind = False
    for place, line in enumerate(lines, start=first + 1):
        is_header = line.startswith("#") and "(GB/s)" in line
        if is_row(line) or (is_behind and not is_header and holds_row(line)):
            yield place, line
        is_behind = is_behind or is_header


@dataclass(frozen=True, slots=True)
class _About:
    collectives: tuple[str, ...]
    gpu: str
    ranks: int
    nodes: int
    version: str
    mixed: str
    """What is wrong with its GPUs, "" for nothing."""
    variables: str
    split: str
    """What is wrong with its communicators, "" for nothing."""
    incomplete: str
    """What is wrong with the list of its ranks, "" for nothing."""
    header: nccl_headers.Header


def _about(text: str) -> _About:
    listed = re.findall(r"#\s+Rank\s+(\d{1,7}) .*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.*)", text)
    devices, header = [(host, gpu) for _, host, gpu in listed], nccl_headers.of_text(text)
    version = re.search(r"NCCL version (\d+\.\d+(?:\.\d+)?)", text)
    code = re.search(r"nccl-library=(\d{1,9})(?!\d)", text)
    return _About(
        collectives=said_by(text),
        gpu=devices[0][1].strip() if devices else "",
        ranks=len(devices),
        nodes=len({host for host, _ in devices}),
        version=version[1] if version else _version(int(code[1])) if code else "",
        mixed=_mixed(name.strip() for _, name in devices),
        variables=in_log(text),
        split=nccl_headers.split(re.findall(r"#\s+Rank\s+\d{1,7} Group\s+(\d{1,7})\b", text)),
        incomplete=header.incomplete([int(rank) for rank, _, _ in listed]),
        header=header,
    )


def _mixed(gpus: Iterable[str]) -> str:
    """Why devices are no one kind of GPU, "" where they are: a ring is as fast as the slowest, and nobody knows which the row is of."""
    kinds = sorted(set(gpus))
    return f"GPUs contradict each other: {', '.join(kinds)[:100]}" if len(kinds) > 1 else ""


def _version(code: int) -> str:
    """NCCL's number as people write it: 22707 is 2.27.7, and before 2.9 2804 was 2.8.4."""
    unit = 10_000 if code >= 10_000 else 1000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"


def read_json(text: str, *, source: str, collective: str = "", inter_node: str = "", notes: str = "") -> Rows:
    """One run of nccl-tests' `-J` file (version 2.17 and later); its times are µs."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason="JSON cut or damaged"),))
    results = whole.get("results") if isinstance(whole, dict) else None
    if not isinstance(results, list) or "average_bus_bandwidth" not in whole:
        count = max(1, len(results)) if isinstance(results, list) else 1
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason="not a whole run of nccl-tests", count=count),))
    devices = whole.get("config", {}).get("devices") if isinstance(whole.get("config"), dict) else None
    if not isinstance(devices, list) or not devices or not all(isinstance(one, dict) for one in devices):
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason="no devices listed", count=max(1, len(results))),))
    header = nccl_headers.of_json(whole["config"])
    environment = whole.get("env")
    variables = in_log(" ".join(str(one) for one in environment[:MOST_VARIABLES])) if isinstance(environment, list) else ""
    ranks = [place if type(rank := one.get("rank")) is not int else rank for place, one in enumerate(devices)]
    problem = header.mistimed or nccl_headers.split(str(one.get("group", 0)) for one in devices) or header.incomplete(ranks)
    problem = problem or _mixed(str(one.get("device_info", "")) for one in devices)
    if problem := problem or _out_of_bounds(whole.get("out_of_bounds"), results):
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason=problem, count=max(1, len(results))),))

    def make(result: Any) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if not isinstance(result, dict) or not isinstance(result.get("out_of_place"), dict):
                raise RefusedError("no out-of-place time")
            if _is_wrong(result):
                raise RefusedError(nccl_tables.WRONG)
            timed, name = result["out_of_place"], str(result.get("experiment_name") or "")
            if "time" not in timed and "cpu_time" in timed:
                raise RefusedError(nccl_headers.OF_HOST)
            said = said_by(name) or collectives_of(name) or programs(text[:4096]) or collectives_of(text[:4096])
            found, problem = agreed(said, given=collective, source=source, modelled=FACTORS)
            if problem:
                raise RefusedError(problem)
            if not isinstance(result.get("size"), int):
                raise RefusedError("size missing or no number")
            cells = [str(result.get(key, "")) for key in ("size", "count", "type")]
            if problem := why_not_its_count(found, cells, ranks=len(devices)):
                raise RefusedError(problem)
            return checked(
                NcclRow(
                    collective=found,
                    gpu=str(devices[0].get("device_info", "")),
                    n_ranks=len(devices),
                    n_nodes=len({str(one.get("hostname")) for one in devices}),
                    size_bytes=result["size"],
                    inter_node=inter_node,
                    nccl_version=_version(whole["nccl_version"]) if isinstance(whole.get("nccl_version"), int) else "",
                    notes=f"{notes} {variables}".strip(),
                    assumed=header.assumed,
                    source=source,
                    line=1,
                ),
                Timed(
                    microseconds=number(str(timed.get("time", "")), "time"),
                    algorithm=number(str(timed["alg_bw"]), "algbw") if "alg_bw" in timed else None,
                    bus=number(str(timed.get("bus_bw", "")), "busbw"),
                ),
            )

        return row

    return collect(((place, make(result)) for place, result in enumerate(results, start=1)), source)


def _is_wrong(result: Any) -> bool:
    """Whether any value that a row came to is wrong, out of place or in place."""
    runs = (result.get("out_of_place"), result.get("in_place")) if isinstance(result, dict) else ()
    return any(isinstance(run, dict) and isinstance(wrong := run.get("nwrong"), int | float) and wrong > 0 for run in runs)


def _out_of_bounds(summary: Any, results: list[Any]) -> str:
    """Why a whole run is refused that says values are out of bounds and has no row to blame, as its text is; "" for all others."""
    if not isinstance(summary, dict) or any(map(_is_wrong, results)):
        return ""
    count = summary.get("count")
    failed = summary.get("okay") is False or (isinstance(count, int | float) and count > 0)
    return f"{nccl_tables.WRONG}: out of bounds values" if failed else ""
