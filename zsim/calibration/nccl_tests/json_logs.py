"""JSON output of nccl-tests. A file that was cut, or that is of no whole run, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from zsim.calibration.nccl_tests import log_headers, log_tables
from zsim.calibration.nccl_tests.checks import (
    FACTORS,
    LogOrigin,
    RanRow,
    RefusedError,
    Rows,
    Timed,
    checked,
    collect,
    number,
)
from zsim.calibration.nccl_tests.collective_names import agreed, collectives_of, programs, said_by
from zsim.calibration.nccl_tests.log_lines import why_not_its_count
from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.variables import listed
from zsim.calibration.records import Skipped

MOST_VARIABLES = 10_000
"""Most variables of an environment that are read."""
HEAD = 4096
"""Characters at a file's beginning in which its program is named."""


def read_json(text: str, *, source: str, collective: str = "") -> Rows:
    """One run of nccl-tests' `-J` file (version 2.17 and later), with out-of-place times; those are
    µs."""
    origin = LogOrigin(source=source, collective=collective)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _skipped("JSON cut or damaged", [], origin)
    results = whole.get("results") if isinstance(whole, dict) else None
    if not isinstance(results, list) or "average_bus_bandwidth" not in whole:
        return _skipped("not a whole run of nccl-tests", results, origin)
    devices = whole["config"].get("devices") if isinstance(whole.get("config"), dict) else None
    if (
        not isinstance(devices, list)
        or not devices
        or not all(isinstance(device, dict) for device in devices)
    ):
        return _skipped("no devices listed", results, origin)
    run = _JsonRun(
        whole=whole, head=text[:HEAD], devices=devices, header=log_headers.of_json(whole["config"])
    )
    if reason := next(filter(None, run.problems()), ""):
        return _skipped(reason, results, origin)
    return collect(
        (
            (index, partial(run.row, result, origin))
            for index, result in enumerate(results, start=1)
        ),
        origin.source,
    )


def _skipped(reason: str, results: Any, origin: LogOrigin) -> Rows:
    count = max(1, len(results)) if isinstance(results, list) else 1
    return Rows(skipped=(Skipped(source=origin.source, line=1, reason=reason, count=count),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _JsonRun:
    """The object of one whole run, the beginning of its text, its devices by rank, its header."""

    whole: dict[str, Any]
    head: str
    devices: list[dict[str, Any]]
    header: log_headers.Header

    def problems(self) -> Iterator[str]:
        """Reasons why none of it can be used."""
        ranks = [
            rank if type(rank := device.get("rank")) is int else index
            for index, device in enumerate(self.devices)
        ]
        yield self.header.mistimed
        yield log_headers.split(str(device.get("group", 0)) for device in self.devices)
        yield self.header.incomplete(ranks)
        yield log_headers.mixed(str(device.get("device_info", "")) for device in self.devices)
        yield _out_of_bounds(self.whole.get("out_of_bounds"), self.whole["results"])

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """NCCL's variables in its environment."""
        env = self.whole.get("env")
        return listed(" ".join(map(str, env[:MOST_VARIABLES]))) if isinstance(env, list) else ()

    @property
    def version(self) -> str:
        """Version of NCCL, "" where it is missing."""
        code = self.whole.get("nccl_version")
        return log_headers.version(code) if type(code) is int else ""

    def row(self, result: Any, origin: LogOrigin) -> LogRow:
        """The row of one result; RefusedError with what is wrong with it."""
        if not isinstance(result, dict) or not isinstance(result.get("out_of_place"), dict):
            raise RefusedError("no out-of-place time")
        if _is_wrong(result):
            raise RefusedError(log_tables.WRONG)
        timed, name = result["out_of_place"], self._collective(result, origin)
        if "time" not in timed and "cpu_time" in timed:
            raise RefusedError(log_headers.OF_HOST)
        if type(result.get("size")) is not int:
            raise RefusedError("size missing or no number")
        cells = [str(result.get(key, "")) for key in ("size", "count", "type")]
        if problem := why_not_its_count(name, cells, ranks=len(self.devices)):
            raise RefusedError(problem)
        return checked(
            RanRow(
                op=name, gpu=str(self.devices[0].get("device_info", "")),
                num_ranks=len(self.devices),
                num_nodes=len({str(device.get("hostname")) for device in self.devices}),
                nbytes=result["size"], version=self.version, variables=self.variables,
                assumed=self.header.assumed, line=1,
            ),
            Timed(
                microseconds=number(str(timed.get("time", "")), "time"),
                algorithm=number(str(timed["alg_bw"]), "algbw") if "alg_bw" in timed else None,
                bus=number(str(timed.get("bus_bw", "")), "busbw"),
            ),
            origin,
        )

    def _collective(self, result: dict[str, Any], origin: LogOrigin) -> str:
        """The collective that the result names, or else the beginning of the file; RefusedError for
        none or several."""
        name = str(result.get("experiment_name") or "")
        names = (
            said_by(name)
            or collectives_of(name)
            or programs(self.head)
            or collectives_of(self.head)
        )
        collective, problem = agreed(
            names, option=origin.collective, source=origin.source, modelled=FACTORS
        )
        if problem:
            raise RefusedError(problem)
        return collective


def _is_wrong(result: Any) -> bool:
    """True where any value that a row came to is wrong, out of place or in place."""
    runs = (result.get("out_of_place"), result.get("in_place")) if isinstance(result, dict) else ()
    return any(
        isinstance(run, dict) and isinstance(wrong := run.get("nwrong"), int | float) and wrong > 0
        for run in runs
    )


def _out_of_bounds(summary: Any, results: list[Any]) -> str:
    """The reason to refuse a whole run with values out of bounds and no row to blame, as text logs
    do; "" for none."""
    if not isinstance(summary, dict) or any(map(_is_wrong, results)):
        return ""
    count = summary.get("count")
    failed = summary.get("okay") is False or (isinstance(count, int | float) and count > 0)
    return f"{log_tables.WRONG}: out of bounds values" if failed else ""
