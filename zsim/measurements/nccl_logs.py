"""What nccl-tests itself writes: its text and its JSON. A log that was cut, and one that does not say what it ran, is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from zsim.measurements import nccl_headers
from zsim.measurements.nccl_checks import FACTORS, RefusedError, Rows, Skipped, Timed, checked, collect, number
from zsim.measurements.nccl_lines import holds_row, is_row, why_no_row, why_not_its_count
from zsim.measurements.nccl_names import agreed, collectives_of, programs, said_by
from zsim.measurements.nccl_rows import NcclRow
from zsim.measurements.nccl_units import size_unit
from zsim.measurements.nccl_words import in_log

MOST_VARIABLES = 10_000
"""Of an environment that is looked through."""
OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values : .*FAILED", re.MULTILINE)
STARTS = ("# nccl-tests version", "# Collective test starting", "# nThread")
"""What the lines begin with that a run begins with."""
PREFIX = re.compile(
    r"^(?:[ \t]*(?:\[\d+,\d+\]<std(?:out|err|diag)>:|\[[A-Za-z_-]*\d+\]:|\[[\w.-]+:\d+\]|\d{4}-\d\d-\d\dT[\d:.]+Z?(?=[ \t])"
    r"|\d{1,6}:(?!\d)))+[ \t]?",
    re.MULTILINE,
)
"""What launchers put before a line: `mpirun --tag-output`, torchrun's [default0]:, [host:process], times, `srun -l`'s task."""
REDUCES: dict[str, bool] = {"all_reduce": True, "reduce_scatter": True, "all_gather": False, "broadcast": False}
"""Whether a collective has an operation, which nccl-tests prints as `redop`, and "none" of those that have not."""


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


def plain(text: str) -> str:
    """The text without what launchers put before each line."""
    return PREFIX.sub("", text)


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
        has_body = has_body or line.startswith("#  Rank") or is_row(line)
    yield begin, lines[begin:]


def _read_run(lines: list[str], first: int, source: str, collective: str, gpu: str, inter_node: str, notes: str) -> Rows:
    text = "\n".join(lines)
    table = [(place, line.split()) for place, line in _table(lines, first)]
    about = _about(text)
    words = next((line for line in lines if line.startswith("#") and "(GB/s)" in line), "")
    wrong = _columns_of_wrong(lines)
    name, problem_of_name = agreed(about.collectives, given=collective, source=source, modelled=FACTORS)
    problem = ""
    if not any(line.startswith("# Avg bus bandwidth") for line in lines):
        problem = "log cut: no closing summary"
    elif "(us)" not in words:
        problem = "no time in us"
    elif any(line.startswith("#") and "cputime" in line for line in lines):
        problem = "times of the host (-C 1), not of the collective"
    elif about.groups > 1:
        problem = f"{about.groups} communicators at once (NCCL_TESTS_SPLIT): no model of what they take from one another"
    elif OUT_OF_BOUNDS.search(text) and not any(_is_some(cell) for _, cells in table for place in wrong for cell in cells[place:][:1]):
        problem = "wrong results: out of bounds values"
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
            if problem := why_no_row(cells) or why_not_its_count(name, cells, ranks=about.ranks):
                raise RefusedError(problem)
            if any(_is_some(cell) for place in wrong for cell in cells[place : place + 1]):
                raise RefusedError("wrong results")
            if not about.collectives and REDUCES[name] == (cells[3] == "none"):
                raise RefusedError(f"its operation is {cells[3][:20]}, which contradicts {name}")
            timed = Timed(microseconds=number(cells[5], "time"), algorithm=number(cells[6], "algbw"), bus=number(cells[7], "busbw"))
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
                    assumed=about.assumed,
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
    groups: int
    """Communicators, each of some of its ranks."""
    incomplete: str
    """What is wrong with the list of its ranks, "" for nothing."""
    assumed: tuple[str, ...]


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
        groups=max(1, len(set(re.findall(r"#\s+Rank\s+\d{1,7} Group\s+(\d{1,7})\b", text)))),
        incomplete=header.incomplete([int(rank) for rank, _, _ in listed]),
        assumed=header.assumed,
    )


def _columns_of_wrong(lines: list[str]) -> list[int]:
    """The columns of how many results are wrong, out of place and in place, where a table has them."""
    header = next((line.split()[1:] for line in lines if line.startswith("#") and "#wrong" in line), [])
    return [place for place, word in enumerate(header) if word == "#wrong"]


def _is_some(cell: str) -> bool:
    """Whether so many results are wrong, a number of six digits at most or as 1e+06."""
    try:
        return not float(cell) <= 0
    except ValueError:  # N/A
        return False


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
    header, groups = nccl_headers.of_json(whole["config"]), {str(one.get("group", 0)) for one in devices}
    environment = whole.get("env")
    variables = in_log(" ".join(str(one) for one in environment[:MOST_VARIABLES])) if isinstance(environment, list) else ""
    ranks = [place if type(rank := one.get("rank")) is not int else rank for place, one in enumerate(devices)]
    split = f"{len(groups)} communicators at once: no model of what they take from one another" if len(groups) > 1 else ""
    if wrong_devices := split or header.incomplete(ranks) or _mixed(str(one.get("device_info", "")) for one in devices):
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason=wrong_devices, count=max(1, len(results))),))

    def make(result: Any) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if not isinstance(result, dict) or not isinstance(result.get("out_of_place"), dict):
                raise RefusedError("no out-of-place time")
            for run in (result["out_of_place"], result.get("in_place")):
                if isinstance(run, dict) and isinstance(wrong := run.get("nwrong"), int | float) and wrong > 0:
                    raise RefusedError("wrong results")
            timed, name = result["out_of_place"], str(result.get("experiment_name") or "")
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
