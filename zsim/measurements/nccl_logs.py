"""What nccl-tests itself writes: its text and its JSON. A log that was cut, and one that does not say what it ran, is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zsim.measurements.nccl_checks import RefusedError, Rows, Skipped, Timed, checked, collect, collective_of, number
from zsim.measurements.nccl_rows import NcclRow

UNNAMED = "no collective named: `--collective` says it, or the file's name, as all_gather.txt"


def read_text(
    text: str, *, source: str, collective: str = "", gpu: str = "", inter_node: str = "", notes: str = ""
) -> Rows:
    """One run of nccl-tests as it prints it, its out-of-place times. What the text does not say can be given.

    A collective that neither says is looked for in the file's name. A log without its closing summary was cut, and its last row may be
    too: none of it is used.
    """
    lines = text.splitlines()
    table = [(number, line.split()) for number, line in enumerate(lines, start=1) if re.match(r"\s*\d+\s+\d+\s", line)]
    about = _about(text)
    words = next((line for line in lines if line.startswith("#") and "(GB/s)" in line), "")
    problem, name = "", collective or about.collective or collective_of(source)
    if not any(line.startswith("# Avg bus bandwidth") for line in lines):
        problem = "log cut: no closing summary"
    elif "(us)" not in words:
        problem = "no time in us"
    elif not name:
        problem = UNNAMED
    elif not about.ranks:
        problem = "no devices listed"
    if problem or not table:
        reason = problem or "no rows"
        return Rows(rows=(), skipped=(Skipped(source=source, line=len(lines), reason=reason, count=max(1, len(table))),))

    def make(cells: list[str], place: int) -> Callable[[], NcclRow]:
        def row() -> NcclRow:
            if len(cells) < 8:
                raise RefusedError("fewer fields than the table has")
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
                    notes=notes,
                    source=source,
                    line=place,
                ),
                timed,
            )

        return row

    return collect(((number, make(cells, number)) for number, cells in table), source)


@dataclass(frozen=True, slots=True)
class _About:
    collective: str
    gpu: str
    ranks: int
    nodes: int
    version: str


def _about(text: str) -> _About:
    started = re.search(r"\w+_perf\b", text)
    devices = re.findall(r"#\s+Rank\s+\d+ .*?\bon\s+(\S+)\s+device\s+\d+ \[[^\]]*\]\s*(.*)", text)
    version = re.search(r"NCCL version (\d+\.\d+(?:\.\d+)?)", text)
    code = re.search(r"nccl-library=(\d+)", text)
    return _About(
        collective=collective_of(started[0]) if started else "",
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
                raise RefusedError("no out-of-place time")
            timed, name = result["out_of_place"], str(result.get("experiment_name") or "")
            found = collective or collective_of(name) or collective_of(text[:4096]) or collective_of(source)
            if not found:
                raise RefusedError(UNNAMED)
            if not isinstance(result.get("size"), int):
                raise RefusedError("size missing or no number")
            return checked(
                NcclRow(
                    collective=found,
                    gpu=str(devices[0].get("device_info", "")),
                    n_ranks=len(devices),
                    n_nodes=len({str(one.get("hostname")) for one in devices}),
                    size_bytes=result["size"],
                    inter_node=inter_node,
                    nccl_version=_version(whole["nccl_version"]) if isinstance(whole.get("nccl_version"), int) else "",
                    notes=notes,
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
