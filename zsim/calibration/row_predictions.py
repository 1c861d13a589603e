"""Rows of measurements predicted: a collective, a step's time, the peaks of its memory.

A row that leaves keys open is every scenario that it may have been. Their middle is the prediction,
and its band holds the bands of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zsim.calibration import collectives, impossible, memory_pressure
from zsim.calibration.records import Collective, Impossible, Skipped, Step, middle
from zsim.cluster.collectives.nccl.bands import LARGE, MIDDLE
from zsim.engine.bands.error_bands import step_shares
from zsim.engine.bands.step_shares import widened
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.errors import ZsimError
from zsim.ir.program import Program
from zsim.memory import fits
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One row: seconds predicted and measured, the band of the prediction as factors, and what the
    row leaves open."""

    source: str
    line: int
    kind: str
    gpu: str
    nodes: int
    predicted: float
    measured: float
    band: tuple[float, float]
    assumed: tuple[str, ...]
    fields: Mapping[str, str]
    per: float = 1.0
    """Tokens of a step, by which pairs divide times: more work is no slower machine."""
    of: str = ""
    """Further key of its group: the collective and its size, or the table's `group`."""
    unit: Literal["s", "B"] = "s"
    """Unit of `predicted` and `measured`: seconds, or bytes of a peak."""
    hidden: float = 0.0
    """Share of the predicted step in which compute hides communication."""

    @property
    def error(self) -> float:
        """Relative: above 0 predicted too slow."""
        return self.predicted / self.measured - 1


def predictions(row: Step | Collective) -> list[Predicted | Skipped | Impossible]:
    """A row's time and peaks predicted, or the reason why the row is skipped or impossible.

    Rows are skipped where the simulator refuses the scenario or an arithmetic error occurs, so that
    one row never ends a folder.
    """
    if isinstance(row, Step) and row.simulated:
        return [Skipped(source=row.source, line=row.line, reason="simulated, not measured")]
    try:
        return [of_collective(row)] if isinstance(row, Collective) else [*of_step(row)]
    except (ZsimError, ArithmeticError, ValueError) as error:
        return [Skipped(source=row.source, line=row.line, reason=str(error))]


Size = Literal["large", "middle", "small"]


def size_of(nbytes: int) -> Size:
    """The size of a message: large from 64 MiB, middle from 1 MiB, small below."""
    return "large" if nbytes >= LARGE else "middle" if nbytes >= MIDDLE else "small"


def of_collective(row: Collective) -> Predicted | Impossible:
    """A collective by NCCL's model, unless its links could not carry it."""
    if (no_row := impossible.of_collective(row)) is not None:
        return no_row
    answer = collectives.predict(row)
    low, high = (end / answer.microseconds for end in (answer.low, answer.high))
    return Predicted(
        source=row.source, line=row.line, kind="collective",
        of=", ".join(filter(None, (f"{row.op} {size_of(row.nbytes)}", row.group))),
        gpu=row.cluster.device.name, nodes=row.cluster.num_nodes,
        predicted=answer.microseconds / 1e6, measured=row.seconds, band=(low, high),
        assumed=tuple(caveat.text for caveat in row.caveats),
        fields={
            "collective": row.op, "cluster": row.cluster.name,
            "ranks": str(row.cluster.num_ranks), "bytes": str(row.nbytes),
        },
    )


def of_step(step: Step) -> Iterator[Predicted | Impossible]:
    """A step's time simulated, and the peaks of its memory; ZsimError where it cannot be."""
    programs = [plan(each, device=each.cluster.kind) for each in step.readings]
    if (no_row := impossible.of_step(step, programs)) is not None:
        yield no_row
        return
    if step.seconds is not None:
        yield _timed(step, step.seconds, programs)
    answers = [
        fits.assess_program(
            program, each.cluster, expandable_segments=each.expandable_segments
        )
        for each, program in zip(step.readings, programs, strict=True) if step.peaks
    ]
    for name, nbytes in step.peaks.items():
        sizes = [
            {"allocated": answer.allocated_bytes, "reserved": answer.reserved_bytes}[name]
            for answer in answers
        ]
        size = round(middle(sizes))
        low = min(1.0, min(answer.allocated_bytes for answer in answers) / size)
        yield _predicted(
            step, kind="peak", of=name, unit="B", predicted=size, measured=nbytes,
            band=(low / (1 + step.widened), max(sizes) / size * (1 + step.widened)),
        )


def _timed(step: Step, measured: float, programs: Sequence[Program]) -> Predicted:
    """The middle of what the readings of a row come to; its band holds the bands of all."""
    times = [
        _reading(step, each, program)
        for each, program in zip(step.readings, programs, strict=True)
    ]
    predicted = middle(each.seconds for each in times)
    texts = dict.fromkeys(text for each in times for text in each.caveats)
    return _predicted(
        step, kind="step", predicted=predicted, measured=measured,
        band=(
            min(each.low for each in times) / predicted,
            max(each.high for each in times) / predicted,
        ),
        assumed=tuple(texts), per=step.tokens, hidden=middle(each.hidden for each in times),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The seconds of one scenario that a row may have been, with the ends of its band."""

    seconds: float
    low: float
    high: float
    hidden: float
    caveats: tuple[str, ...]


def _reading(step: Step, scenario: Scenario, program: Program) -> _Reading:
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    program, caveats = memory_pressure.pressed(scenario, program)
    timeline = simulate_step(program, costs=costs)
    shares = step_shares(program, timeline, costs=costs)
    low, high = shares.on_shared_network(*step.network) if step.is_shared else shares.factors
    low, high = widened(low, high, by=step.widened)
    seconds = timeline.step_time_ns / 1e9
    return _Reading(
        seconds=seconds, low=seconds * low, high=seconds * high, hidden=shares.hidden,
        caveats=tuple(caveat.text for caveat in caveats),
    )


def _predicted(
    step: Step, *, kind: str, predicted: float, measured: float, band: tuple[float, float],
    assumed: tuple[str, ...] = (), of: str = "", unit: Literal["s", "B"] = "s", per: float = 1.0,
    hidden: float = 0.0,
) -> Predicted:
    cluster = step.scenario.cluster
    return Predicted(
        source=step.source, line=step.line, kind=kind, of=", ".join(filter(None, (of, step.group))),
        gpu=cluster.device.name, nodes=cluster.num_nodes, predicted=predicted, measured=measured,
        band=band, assumed=(*(caveat.text for caveat in step.caveats), *assumed),
        fields=step.fields, per=per, unit=unit, hidden=hidden,
    )
