"""Files of nccl measurements: CSVs with a header, nccl-tests' text and its JSON. A row that cannot be used is skipped by name.

Every row is checked against itself: time, size and bus bandwidth say the same thing twice, so a time in another unit, a size
of one rank's part, or a wrong number of ranks contradicts the bandwidth and is refused. Nothing is averaged.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zsim.measurements.nccl_rows import NcclRow, UnknownGpuError, mapped

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over size/time, by nccl-tests' convention (doc/PERFORMANCE.md)."""
CONTRADICTION = 0.05
"""How far a printed bandwidth may be from size/time: times from a plot and bandwidths of three digits are that exact."""
MOST_BYTES = 1 << 44
CSV_NEEDS: tuple[str, ...] = ("collective", "gpu", "n_ranks", "n_nodes", "size_bytes")
CSV_TIMES: tuple[str, ...] = ("time_us_oop", "time_us")
CSV_BUS: tuple[str, ...] = ("busbw_gb_s_oop", "busbw_gb_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Rows that were not used: where, why, and how many."""

    source: str
    line: int
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a file gave: rows that can be predicted, and those that were skipped, by name."""

    rows: tuple[NcclRow, ...]
    skipped: tuple[Skipped, ...]

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows were skipped for each reason."""
        counts: Counter[str] = Counter()
        for one in self.skipped:
            counts[one.reason] += one.count
        return dict(sorted(counts.items()))


class _RefusedError(ValueError):
    """Why a row cannot be used."""


def read(path: Path) -> Rows:
    """The rows of `path`, by its first characters: JSON, a CSV with a header, or nccl-tests' text. OSError if it cannot be read."""
    return read_any(path.read_text(encoding="utf-8-sig", errors="replace"), source=path.name)


def read_any(text: str, *, source: str) -> Rows:
    """The rows of a file's text, whichever of the three it is."""
    if text.lstrip().startswith("{"):
        return read_json(text, source=source)
    return read_csv(text, source=source) if is_csv(text) else read_text(text, source=source)


def is_csv(text: str) -> bool:
    """Whether the first line is the header of a CSV of nccl rows, whatever else it has."""
    header = text.partition("\n")[0].strip().split(",")
    return {"collective", "size_bytes"} <= {name.strip() for name in header}


def read_csv(text: str, *, source: str) -> Rows:
    """Rows under a header that has at least `CSV_NEEDS` and one of `CSV_TIMES`; other columns may be missing or more."""
    try:
        return _read_csv(text, source)
    except csv.Error as damaged:
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason=f"CSV damaged: {damaged}"),))


def _read_csv(text: str, source: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text))
    header = set(reader.fieldnames or ())
    lacking = [name for name in CSV_NEEDS if name not in header]
    if not header & set(CSV_TIMES):
        lacking.append(" or ".join(CSV_TIMES))
    if lacking:
        count = sum(1 for _ in reader)
        return Rows(rows=(), skipped=(Skipped(source=source, line=1, reason=f"no column {', '.join(lacking)}", count=count),))
    return _collect(((reader.line_num, _csv_row(table, source, reader.line_num)) for table in reader), source)


def _csv_row(table: dict[str, str | None], source: str, line: int) -> Callable[[], NcclRow]:
    def make() -> NcclRow:
        if None in table or any(value is None for value in table.values()):
            raise _RefusedError("more or fewer fields than the header")
        said = {key: (value or "").strip() for key, value in table.items()}
        ranks, nodes, size = (_whole(said, name) for name in ("n_ranks", "n_nodes", "size_bytes"))
        time = next((said[name] for name in CSV_TIMES if said.get(name)), "")
        bus = next((said[name] for name in CSV_BUS if said.get(name)), "")
        _inferred(said.get("n_ranks_inferred", ""), ranks)
        return _checked(
            NcclRow(
                collective=said["collective"],
                gpu=said["gpu"],
                n_ranks=ranks,
                n_nodes=nodes,
                size_bytes=size,
                intra_node=said.get("intra_node", ""),
                inter_node=said.get("inter_node", ""),
                nccl_version=said.get("nccl_version", ""),
                tool=said.get("tool", ""),
                notes=said.get("notes", ""),
                microseconds=_number(time, "time_us"),
                origin=said.get("source", ""),
                source=source,
                line=line,
            ),
            _number(bus, "busbw") if bus else None,
        )

    return make


def read_text(
    text: str, *, source: str, collective: str = "", gpu: str = "", inter_node: str = "", notes: str = ""
) -> Rows:
    """One run of nccl-tests as it prints it, its out-of-place times. What the text does not say can be given.

    A log without its closing summary was cut, and its last row may be too: none of it is used.
    """
    lines = text.splitlines()
    table = [(number, line.split()) for number, line in enumerate(lines, start=1) if re.match(r"\s*\d+\s+\d+\s", line)]
    about = _about(text)
    words = next((line for line in lines if line.startswith("#") and "(GB/s)" in line), "")
    problem = ""
    if not any(line.startswith("# Avg bus bandwidth") for line in lines):
        problem = "log cut: no closing summary"
    elif "(us)" not in words:
        problem = "no time in us"
    elif not (collective or about.collective):
        problem = "no collective named"
    elif not about.ranks:
        problem = "no devices listed"
    if problem or not table:
        reason = problem or "no rows"
        return Rows(rows=(), skipped=(Skipped(source=source, line=len(lines), reason=reason, count=max(1, len(table))),))

    def make(cells: list[str], number: int) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if len(cells) < 8:
                raise _RefusedError("fewer fields than the table has")
            time, bus = _number(cells[5], "time"), _number(cells[7], "busbw")
            return _checked(
                NcclRow(
                    collective=collective or about.collective,
                    gpu=gpu or about.gpu,
                    n_ranks=about.ranks,
                    n_nodes=about.nodes,
                    size_bytes=int(cells[0]),
                    inter_node=inter_node,
                    nccl_version=about.version,
                    notes=notes,
                    microseconds=time,
                    source=source,
                    line=number,
                ),
                bus,
            )

        return row

    return _collect(((number, make(cells, number)) for number, cells in table), source)


@dataclass(frozen=True, slots=True)
class _About:
    collective: str
    gpu: str
    ranks: int
    nodes: int
    version: str


def _about(text: str) -> _About:
    started = re.search(r"(all_reduce|all_gather|reduce_scatter|broadcast)_perf", text)
    devices = re.findall(r"#\s+Rank\s+\d+ .*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.*)", text)
    version = re.search(r"NCCL version (\d+\.\d+(?:\.\d+)?)", text)
    code = re.search(r"nccl-library=(\d+)", text)
    return _About(
        collective=started[1] if started else "",
        gpu=devices[0][1].strip() if devices else "",
        ranks=len(devices),
        nodes=len({host for host, _ in devices}),
        version=version[1] if version else _version(int(code[1])) if code else "",
    )


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

    def make(result: Any) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if not isinstance(result, dict) or not isinstance(result.get("out_of_place"), dict):
                raise _RefusedError("no out-of-place time")
            timed, name = result["out_of_place"], str(result.get("experiment_name") or "")
            found = re.search(r"all_reduce|all_gather|reduce_scatter|broadcast", collective or name or text[:4096])
            if found is None:
                raise _RefusedError("no collective named")
            if not isinstance(result.get("size"), int):
                raise _RefusedError("size missing or no number")
            return _checked(
                NcclRow(
                    collective=found[0],
                    gpu=str(devices[0].get("device_info", "")),
                    n_ranks=len(devices),
                    n_nodes=len({str(one.get("hostname")) for one in devices}),
                    size_bytes=result["size"],
                    inter_node=inter_node,
                    nccl_version=_version(whole["nccl_version"]) if isinstance(whole.get("nccl_version"), int) else "",
                    notes=notes,
                    microseconds=_number(str(timed.get("time", "")), "time"),
                    source=source,
                    line=1,
                ),
                _number(str(timed.get("bus_bw", "")), "busbw"),
            )

        return row

    return _collect(((place, make(result)) for place, result in enumerate(results, start=1)), source)


def _collect(makers: Iterable[tuple[int, Callable[[], NcclRow]]], source: str) -> Rows:
    rows: list[NcclRow] = []
    skipped: list[Skipped] = []
    for line, make in makers:
        try:
            rows.append(make())
        except _RefusedError as refused:
            skipped.append(Skipped(source=source, line=line, reason=str(refused)))
    return Rows(rows=tuple(rows), skipped=tuple(skipped))


def _checked(row: NcclRow, bus: float | None) -> NcclRow:
    """The row, if it contradicts neither itself nor what there is a model of."""
    if row.collective not in FACTORS:
        raise _RefusedError(f"collective {row.collective[:40]!r} has no model")
    if not (2 <= row.n_ranks <= 1 << 20 and 1 <= row.n_nodes <= row.n_ranks and row.n_ranks % row.n_nodes == 0):
        raise _RefusedError("ranks and nodes contradict each other")
    if not 0 < row.size_bytes <= MOST_BYTES or not row.microseconds or row.microseconds <= 0:
        raise _RefusedError("size or time is not above 0")
    try:
        mapped(row)
    except UnknownGpuError:
        raise _RefusedError(f"no NCCL model of the GPU {row.gpu[:40]!r}") from None
    if bus is not None:
        expected = row.size_bytes / row.microseconds / 1000 * FACTORS[row.collective](row.n_ranks)
        if abs(expected - bus) > max(CONTRADICTION * expected, 0.02):
            raise _RefusedError("time, size and bus bandwidth contradict one another")
    return row


def _inferred(text: str, ranks: int) -> None:
    if text and abs(_number(text, "n_ranks_inferred") / ranks - 1) > CONTRADICTION:
        raise _RefusedError("ranks contradict those that the bandwidths imply")


def _whole(said: dict[str, str], name: str) -> int:
    text = said.get(name, "")
    if not re.fullmatch(r"\d{1,15}", text):
        raise _RefusedError(f"{name} missing or no whole number")
    return int(text)


def _number(text: str, name: str) -> float:
    if not re.fullmatch(r"\d{1,15}(?:\.\d{1,12})?(?:e[+-]?\d{1,2})?", text.strip(), re.IGNORECASE):
        raise _RefusedError(f"{name} missing or no number")
    return float(text)
