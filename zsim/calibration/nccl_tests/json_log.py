"""JSON output of nccl-tests (`-J`, since its version 2.17): one whole run, else it is skipped."""

from __future__ import annotations

from pydantic import BaseModel, Field, ValidationError

from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.logged_run import ListedDevice, LoggedRun, Result
from zsim.calibration.nccl_tests.variables import listed
from zsim.calibration.records import Skipped
from zsim.io.json_tables import complaint

MOST_VARIABLES = 10_000
"""Most variables of an environment that are read."""


class _Device(BaseModel):
    rank: int
    group: int = 0
    hostname: str
    device_info: str


class _Config(BaseModel):
    devices: list[_Device]
    blocking_collectives: bool | int | str = False
    aggregated_iterations: int = 1
    graph: int = 0


class _Timed(BaseModel):
    time: float
    bus_bw: float


class _Result(BaseModel):
    size: int
    count: int
    type: str
    redop: str = ""
    out_of_place: _Timed
    experiment_name: str = ""


class _OutOfBounds(BaseModel):
    okay: bool = True


class _Run(BaseModel):
    config: _Config
    results: list[_Result]
    average_bus_bandwidth: object
    args: list[str] = Field(default_factory=list)
    env: list[str] = Field(default_factory=list)
    out_of_bounds: _OutOfBounds = _OutOfBounds()


def read_json(text: str, *, source: str, collective: str = "") -> list[LogRow | Skipped]:
    """Rows of one run, with out-of-place times in µs."""
    try:
        run = _Run.model_validate_json(text)
    except ValidationError as error:
        problem = "{}: expected {}, found {}".format(*complaint(error))
        reason = f"not a whole run of nccl-tests: {problem}"
        return [Skipped(source=source, line=1, reason=reason)]
    config, failed = run.config, not run.out_of_bounds.okay
    programs = [each.experiment_name for each in run.results] + run.args
    logged = LoggedRun(
        first=1, last=1, program=next(filter(None, map(_program, programs)), ""),
        devices=tuple(
            ListedDevice(rank=device.rank, group=device.group, host=device.hostname,
                         gpu=device.device_info)
            for device in config.devices
        ),
        results=tuple(
            Result(
                line=index, nbytes=result.size, count=result.count, dtype=result.type,
                operation=result.redop, microseconds=result.out_of_place.time,
                bus=result.out_of_place.bus_bw,
            )
            for index, result in enumerate(run.results, start=1)
        ),
        variables=listed(" ".join(run.env[:MOST_VARIABLES])),
        is_blocking=str(config.blocking_collectives).lower() not in ("", "false", "0", "none"),
        grouped=config.aggregated_iterations, graphs=config.graph,
        problem="wrong results: out of bounds values" if failed else "",
    )
    return logged.rows(source=source, collective=collective)


def _program(word: str) -> str:
    """The collective of the program that `word` names, as build/all_reduce_perf; "" for none."""
    name, is_program, _ = word.rpartition("/")[2].partition("_perf")
    return name if is_program else ""
