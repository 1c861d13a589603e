"""Run and Comparison, as `import zsim` returns them: what backends recorded, with its figures.

It reads records and scenarios. It runs nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from zsim.cluster.host import HostMemory
from zsim.io.arguments import path_of
from zsim.io.notebook.html_table import html_table
from zsim.io.quantities import Bytes, Duration
from zsim.io.units import counted, format_bytes
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import (
    SCHEMA_VERSION,
    LateRank,
    MemoryRecord,
    RankRun,
    RunRecord,
    Span,
    band_of,
    sees,
)
from zsim.runs import saved
from zsim.runs.figures import metrics
from zsim.runs.figures.metrics import Figures, Traffic
from zsim.runs.figures.run_figures import Collectives, ExposedCommunication, PeakMemory
from zsim.runs.pictures import plots
from zsim.scenario import expect
from zsim.scenario.expect import Verdict
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of the device that the scenario needs, with all that torch does not count.

    `verdict` is FITS, TIGHT or OOM. The true need is expected between `low_bytes` and `high_bytes`.
    Without room for all of torch's cache, a steady step gives it back `releases_per_step` times,
    which takes `released_ns` of the step; None where the step is not expected to run.
    """

    verdict: str
    needed_bytes: int
    low_bytes: int
    high_bytes: int
    capacity_bytes: int
    releases_per_step: int | None = 0
    released_ns: int = 0
    host: HostMemory | None = None
    """The host memory of a node, where states are offloaded; its own verdict is apart."""

    @property
    def has_room(self) -> bool:
        """False where device or host has too little memory (OOM)."""
        return "OOM" not in (self.verdict, "" if self.host is None else self.host.verdict)

    def __str__(self) -> str:
        host = "" if self.host is None else f"; {self.host}"
        return (
            f"{self.verdict}{' on the device' if host else ''}: needs "
            f"{format_bytes(self.needed_bytes)} ({format_bytes(self.low_bytes)} to "
            f"{format_bytes(self.high_bytes)}) of {format_bytes(self.capacity_bytes)}{host}"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """One run of a scenario on a backend: figures of its steady step, and all that was recorded.

    Sizes are `Bytes`, times are `Duration`; both are ints. A figure that the backend cannot see is
    None.
    """

    record: RunRecord = field(hash=False)
    """The record that the backend returned: every rank's phases, spans and memory."""
    scenario: Scenario
    warnings: tuple[str, ...] = ()
    """Warnings about what runs but costs more than its user may think."""
    device_memory: DeviceMemory | None = None
    """The need of the device's memory, of a simulated run on GPUs; None otherwise."""
    figures: Figures = field(init=False)
    expectations: tuple[Verdict, ...] = field(init=False)
    """A verdict on each entry of the scenario's `expect`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "figures", metrics.figures(self.record, self.scenario))
        figures = _expectable(self.record, self.figures, self.device_memory, self.scenario)
        verdicts = expect.check(self.scenario.expect, figures=figures)
        object.__setattr__(self, "expectations", verdicts)

    @property
    def ok(self) -> bool:
        """True where every expectation held, the run reached its end, and the device has room.

        An OOM that the scenario expects (`fits = false`) is no failure.
        """
        judged = any(item.name == "fits" for item in self.expectations)
        room = judged or self.fits is not False
        held = all(item.ok is not False for item in self.expectations)
        return self.record.complete and held and room

    @property
    def fits(self) -> bool | None:
        """False where the device has too little memory (OOM), or the host for what is offloaded;
        None where that is not asked."""
        return None if self.device_memory is None else self.device_memory.has_room

    @property
    def needed_memory(self) -> Bytes | None:
        """Bytes of the device that the scenario needs, beyond what torch allocates."""
        return None if self.device_memory is None else Bytes(self.device_memory.needed_bytes)

    @property
    def backend(self) -> str:
        """The backend's name: "sim", "gloo", …"""
        return self.record.backend

    @property
    def faults(self) -> tuple[str, ...]:
        """Faults of the scenario that the step had; () for a clean step."""
        return self.record.faults

    @property
    def late(self) -> tuple[LateRank, ...]:
        """Ranks that held collectives up, by time of arrival, those that cost most first.

        Only a step with faults has them, simulated or on one machine.
        """
        return self.record.late

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.record.world_size

    @property
    def ranks(self) -> tuple[RankRun, ...]:
        """The ranks that were recorded; ranks that are alike are one, see `stands_for`."""
        return self.record.ranks

    @property
    def peak_memory(self) -> PeakMemory:
        """The most bytes that torch has allocated at once in the steady step, on any rank."""
        peak = PeakMemory(self.figures.peak_memory_bytes)
        peak.run = self
        return peak

    @property
    def step_time(self) -> Duration | None:
        """The steady step's time; its `band` says between which times the true one is expected."""
        time, band = self.figures.step_time_ns, self.figures.step_time_band_ns
        predicted = band_of(self.record) is not None  # a measured time is its own band
        return None if time is None else Duration(time, band if predicted else None)

    @property
    def exposed_communication(self) -> ExposedCommunication | None:
        """Time in which some collective runs and the compute stream is idle, on the worst rank.

        Its `fraction` is its share of the step.
        """
        if (time := self.figures.exposed_communication_ns) is None:
            return None
        exposed = ExposedCommunication(time)
        exposed.run = self
        return exposed

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, a share of one; None on another device than the scenario's.

        PaLM's FLOPs count all scores of attention. Where it is causal and fused, half of them are
        never computed, so that `mfu` may be above `hfu` and above 1.
        """
        return self.figures.mfu

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization, a share of one; None where `mfu` is."""
        return self.figures.hfu

    @property
    def memory(self) -> MemoryRecord:
        """The steady step's memory on the rank that peaks highest, the first of several.

        `timeline` has (op, bytes allocated after it); it is empty beyond 64 different ranks.
        """
        rank = max(self.ranks, key=lambda r: (r.phases["steady"].memory.peak_bytes, -r.rank))
        return rank.phases["steady"].memory

    @property
    def spans(self) -> tuple[Span, ...]:
        """The ops of the first recorded rank's steady step, with their times in ns."""
        return self.ranks[0].spans

    @property
    def collectives(self) -> Collectives:
        """Count and bytes in all of the first recorded rank's collectives, by kind.

        `collectives.count("all_gather")` is 0 where there are none.
        """
        return Collectives(self.figures.collectives, run=self)

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim run --json` prints for one scenario; its keys are stable."""
        figures = self.figures
        warnings = {"warnings": list(self.warnings)} if self.warnings else {}
        faults = {
            "faults": list(self.faults), "late": [asdict(rank) for rank in self.late]
        } if self.faults else {}
        hosted = {} if figures.off_device is None else {"off_device": asdict(figures.off_device)}
        on_drives = {
            "drive_bytes": _drive_nbytes(self.scenario)
        } if self.scenario.offload.uses_drives else {}
        return {
            "schema_version": SCHEMA_VERSION,
            "scenario": self.record.scenario,
            "backend": self.record.backend,
            "interpreter": self.record.interpreter,
            "world_size": self.record.world_size,
            "step_time_ns": figures.step_time_ns,
            "step_time_band_ns": list(figures.step_time_band_ns)
            if figures.step_time_band_ns
            else None,
            "tokens_per_second_per_gpu": figures.tokens_per_second_per_gpu,
            "mfu": figures.mfu,
            "hfu": figures.hfu,
            "compute_ns": figures.compute_ns,
            "communication_ns": figures.communication_ns,
            "exposed_communication_ns": figures.exposed_communication_ns,
            "bytes_sent_per_rank": figures.bytes_sent_per_rank,
            **hosted,
            **on_drives,
            "collectives": {kind: asdict(traffic) for kind, traffic in figures.collectives.items()},
            "peak_memory_bytes": figures.peak_memory_bytes,
            "device_memory_bytes": figures.device_memory_bytes,
            "device_memory": None if self.device_memory is None else asdict(self.device_memory),
            "peak_first_step_bytes": figures.peak_first_step_bytes,
            "peak_memory_by_kind": dict(figures.peak_memory_by_kind),
            "peak_memory_by_part": dict(figures.peak_memory_by_part),
            "expectations": [verdict.to_dict() for verdict in self.expectations],
            "ok": self.ok,
            "provenance": dict(self.record.provenance),
            **warnings,
            **faults,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record to a file that `zsim compare` reads, and make its folder if need be."""
        saved.save(self.record, path_of(path, where="path"))

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each span of each recorded rank; ZsimError without pandas."""
        return plots.spans_frame(self.record)

    def plot_timeline(self, *, rank: int | None = None) -> Any:
        """matplotlib's Figure of the streams of `rank`, by default the first that was recorded.

        ZsimError without matplotlib, or where the Run has no spans.
        """
        return plots.timeline(self.record, rank=rank)

    def plot_memory(self, *, rank: int | None = None) -> Any:
        """matplotlib's Figure of the bytes allocated by `rank`, by default the one that peaks
        highest; ZsimError as `plot_timeline`."""
        return plots.memory(self.record, rank=rank)

    def _repr_html_(self) -> str:
        """The Run's main figures as a table, for notebooks."""
        exposed = self.exposed_communication
        rows: list[tuple[str, object]] = [
            ("memory", self.device_memory), ("allocated at the peak", self.peak_memory),
            ("step time", self.step_time),
            ("exposed communication", exposed if self.world_size > 1 else None),
            ("MFU", None if self.mfu is None else f"{100 * self.mfu:.1f} %"),
            *((kind, f"{each.count} of {format_bytes(each.bytes)} in all")
              for kind, each in self.figures.collectives.items()),
            *((f"expected {item.name} {item.expected}", f"{'ok' if item.ok else 'NOT OK'}, found "
               f"{item.actual}") for item in self.expectations),
            *(("warning", text) for text in self.warnings),
        ]
        return html_table(
            f"{self.record.scenario} on {self.backend}, {counted(self.world_size, 'rank')}", (),
            [row for row in rows if row[1] is not None],
        )

    def __repr__(self) -> str:
        step = "" if self.step_time is None else f", step {self.step_time}"
        failed = f"{', WITH FAULTS' if self.faults else ''}{'' if self.ok else ', NOT OK'}"
        return (
            f"<Run of {self.record.scenario} on {self.backend}: peak {self.peak_memory}{step}"
            f"{failed}>"
        )


def _expectable(
    run: RunRecord, figures: Figures, needs: DeviceMemory | None, scenario: Scenario
) -> dict[str, expect.Number | None]:
    """The figures of `run` by the names that a scenario's `expect` has for them."""
    # a backend without clocks tells of no late rank
    late = run.late[0].rank if run.late else expect.NO_RANK if sees(run, "time") else None
    # the time of a machine that is not calibrated is reported, and no expectation is held to it
    judged = sees(run, "time")
    return {
        "ends": run.complete, "at_fault": late,
        "fits": None if needs is None else needs.has_room,
        "needed_memory": None if needs is None else needs.needed_bytes,
        "peak_memory": figures.peak_memory_bytes, "peak_first_step": figures.peak_first_step_bytes,
        **({} if needs is None else _off_device(needs.host, scenario)),
        "bytes_sent_per_rank": figures.bytes_sent_per_rank,
        "step_time": figures.step_time_ns if judged else None,
        "exposed_communication": figures.exposed_share if judged else None,
        "mfu": figures.mfu if judged else None, "hfu": figures.hfu if judged else None,
        **{f"{kind}s": figures.collectives.get(kind, Traffic()).count for kind in COLLECTIVES},
    }


def _off_device(host: HostMemory | None, scenario: Scenario) -> dict[str, expect.Number | None]:
    """The figures of a simulated step on a node's `host` and drives."""
    return {
        "peak_host_memory": 0 if host is None else host.offloaded_bytes,
        "needed_host_memory": None if host is None else host.needed_bytes,
        "drive_bytes": _drive_nbytes(scenario),
    }


def _drive_nbytes(case: Scenario) -> int:
    """Bytes on the drives of a full node, of all its ranks."""
    if not case.offload.uses_drives:
        return 0
    of_a_rank = STRATEGIES[case.strategy].drive_nbytes(
        case.offload, case.options, case.model, case.mesh, case.precision, case.optimizer
    )
    return of_a_rank * min(case.cluster.devices_per_node, case.world_size)
