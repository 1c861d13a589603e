"""Exposed communication and time by unit: alike on both sides, judged where the step time is, and
said to be unchecked everywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.folders import SCENARIOS
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import RankRun, RunRecord, Span
from zsim.runs.backend import RunOptions
from zsim.runs.compare.check import Check
from zsim.runs.compare.compare import compare
from zsim.runs.figures.metrics import exposed_ns
from zsim.runs.figures.unit_times import OPTIMIZER, time_by_unit
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario

NAMES = ("exposed communication", "time by unit")


@pytest.fixture(scope="module")
def predicted() -> RunRecord:
    case = scenario.load(SCENARIOS / "overlap/fsdp2-llama-3-8b-8.toml")
    return SimBackend().run(case, options=RunOptions(all_ranks=True))


def measured(predicted: RunRecord, **changes: object) -> RunRecord:
    """The same Run as if real ranks had made it."""
    told = {key: text for key, text in predicted.provenance.items() if key != "band"}
    real = replace(
        predicted, backend="nccl", interpreter="observer", representatives=(),
        provenance={**told, "timed": "by the test"},
    )
    return replace(real, **changes)  # type: ignore[arg-type]


def checks(left: RunRecord, right: RunRecord) -> dict[str, Check]:
    return {item.name: item for item in compare(left, right)}


def with_spans(run: RunRecord, spans: tuple[Span, ...], step_ns: int) -> RunRecord:
    """`run` whose ranks all have `spans` of a recorded step."""
    ranks = tuple(replace(rank, spans=spans, recorded_step_ns=step_ns) for rank in run.ranks)
    return replace(run, ranks=ranks)


def test_a_run_agrees_with_itself_in_what_made_its_time(predicted: RunRecord) -> None:
    by_name = checks(predicted, measured(predicted))
    assert [by_name[name].status for name in NAMES] == ["ok", "ok"]
    rank = predicted.ranks[0]
    assert by_name[NAMES[0]].measured == exposed_ns(rank)
    assert "34 units" in by_name[NAMES[1]].detail  # 32 blocks, the root and the optimizer


def test_the_units_of_a_step_are_all_of_it(predicted: RunRecord) -> None:
    rank, step_ns = predicted.ranks[0], predicted.step_time_ns or 0
    told = time_by_unit(rank, step_ns)
    assert sum(told.values()) == step_ns
    assert set(told) == {span.unit for span in rank.spans} | {OPTIMIZER}
    assert told["blocks.3"] == pytest.approx(told["blocks.4"], rel=0.2)
    assert time_by_unit(replace(rank, spans=()), step_ns) == {}


def test_a_moment_is_of_what_computes_then_of_what_moves_then_of_what_comes() -> None:
    def span(kind: str, unit: str, start: int, end: int) -> Span:
        stream = kind if kind in COLLECTIVES else "compute"
        return Span(
            name=f"{kind} {unit}", kind=kind, unit=unit, stream=stream, start_ns=start, end_ns=end
        )

    spans = (
        span("all_gather", "a", 10, 30), span("forward", "b", 20, 40), span("copy", "c", 40, 55),
        span("optimizer", "root", 60, 70),
    )
    rank = RankRun(rank=0, phases={}, spans=spans)
    assert time_by_unit(rank, 75) == {"optimizer": 35, "a": 20, "b": 20}


def test_a_unit_that_takes_longer_is_named(predicted: RunRecord) -> None:
    """The last unit of forward stretched to half of the step, while the step stays as long."""
    step_ns = predicted.step_time_ns or 0
    slow = next(span for span in predicted.ranks[0].spans if span.name == "forward blocks.7")
    spans = (replace(slow, start_ns=0, end_ns=step_ns // 2),
             *(span for span in predicted.ranks[0].spans if span.start_ns >= step_ns // 2))
    by_name = checks(predicted, with_spans(measured(predicted), spans, step_ns))
    assert by_name["step time"].status == "ok"
    assert by_name["time by unit"].status == "failed"
    assert "blocks.7 furthest" in by_name["time by unit"].detail
    assert "beyond the band" in by_name["time by unit"].detail


def test_communication_that_nothing_hides_fails(predicted: RunRecord) -> None:
    """Kernels gone from the compute stream, as where a stall of each collective is seen."""
    spans = tuple(span for span in predicted.ranks[0].spans if span.kind in COLLECTIVES)
    by_name = checks(predicted, with_spans(measured(predicted), spans, predicted.step_time_ns or 0))
    assert by_name["exposed communication"].status == "failed"


def test_what_cannot_be_judged_says_why_and_is_no_agreement(predicted: RunRecord) -> None:
    bare = replace(
        measured(predicted), ranks=tuple(replace(rank, spans=()) for rank in predicted.ranks)
    )
    slowed = with_spans(
        measured(predicted), predicted.ranks[0].spans, 2 * (predicted.step_time_ns or 0)
    )
    renamed = with_spans(
        measured(predicted),
        tuple(replace(span, unit="layer") for span in predicted.ranks[0].spans),
        predicted.step_time_ns or 0,
    )
    unbanded = replace(
        predicted, provenance={k: v for k, v in predicted.provenance.items() if k != "band"}
    )
    other = measured(predicted)
    elsewhere = replace(other, provenance={**other.provenance, "device": "cpu"})
    cases = {
        "the measured Run, of nccl, has no spans": checks(predicted, bare),
        "the recorded step took": checks(predicted, slowed),
        "the predicted Run, of sim, has no band": checks(unbanded, other),
        "measured on cpu": checks(predicted, elsewhere),
    }
    for reason, by_name in cases.items():
        for name in NAMES:
            assert by_name[name].status == "unsupported"
            assert by_name[name].detail.startswith(f"unsupported: {reason}")
    units = checks(predicted, renamed)["time by unit"]
    assert (units.status, "of other units, as layer" in units.detail) == ("unsupported", True)
