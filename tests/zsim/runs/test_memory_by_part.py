"""Start and peak of forward, backward, optimizer and zero_grad: followed by the ledger, read again
from files, compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.cases.sampling import WHOLE
from tests.support.folders import ROOT
from zsim.errors import ProgramError
from zsim.ir.laws import run_laws
from zsim.ir.laws.validate import validate
from zsim.ir.ledger import Ledger
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import Alloc
from zsim.ir.program import PARTS, PhaseName, RankProgram, StepPart, parse
from zsim.ir.run import MemoryRecord, PartRecord, RunRecord
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.compare.check import Check
from zsim.runs.compare.compare import compare
from zsim.runs.compare.memory.by_part import EXACT, NAME, StepMemory, compare_parts
from zsim.runs.figures.metrics import figures
from zsim.runs.registry import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, load
from zsim.testing.strategies import scenarios

STEPS: tuple[PhaseName, ...] = ("first", "steady")


def record(*parts: tuple[str, int, int]) -> MemoryRecord:
    made = tuple(PartRecord(name, 0, start, peak) for name, start, peak in parts)
    return MemoryRecord(
        start_bytes=0, peak_bytes=max((part.peak_bytes for part in made), default=0), end_bytes=0,
        parts=made,
    )


def naive(program: RankProgram) -> dict[str, list[tuple[str, int, int, int]]]:
    """The parts of both steps by a ledger that is asked after each event."""
    ledger, by_phase = Ledger(), dict[str, list[tuple[str, int, int, int]]]()
    for op in program.construction:
        ledger.apply(op)
    for phase in STEPS:
        ops, parts = program.phase(phase), program.parts(phase)
        ends = [*(part.start for part in parts[1:]), len(ops)]
        by_phase[phase] = []
        for part, end in zip(parts, ends, strict=True):
            start = peak = ledger.allocated
            for op in ops[part.start : end]:
                for event in op.memory:
                    ledger.allocate(event) if isinstance(event, Alloc) else ledger.free(
                        event.buffer
                    )
                    peak = max(peak, ledger.allocated)
            by_phase[phase].append((part.name, part.micro_batch, start, peak))
    return by_phase


@WHOLE
@given(scenarios())
def test_every_step_of_every_strategy_comes_in_parts_which_the_replay_follows(
    case: Scenario
) -> None:
    program = plan(case, device=case.cluster.kind)
    halves = [
        (name, index) for index in range(case.batch.accumulation)
        for name in ("forward", "backward")
    ]
    for rank in program.ranks:
        wanted, records = naive(rank), replay(rank, timeline=False)
        for phase in STEPS:
            parts = [
                (p.name, p.micro_batch, p.start_bytes, p.peak_bytes) for p in records[phase].parts
            ]
            assert parts == wanted[phase]
            assert [part[:2] for part in parts] == [*halves, ("optimizer", 0), ("zero_grad", 0)]
            assert parts[0][2] == records[phase].start_bytes
            assert max(peak for *_, peak in parts) == records[phase].peak_bytes
        assert records["construction"].parts == ()
    assert parse(str(program)) == program


@pytest.mark.parametrize("starts", [(1, 2), (0, 0), (0, 2, 1), (0, 10_000)])
def test_parts_that_are_not_one_after_another_are_no_program(starts: tuple[int, ...]) -> None:
    program = plan(load(ROOT / "scenarios/parity/zero3-mlp-4.toml"), device="cpu")
    parts = tuple(StepPart("forward", start) for start in starts)
    bad = replace(program.ranks[0], steady_parts=parts)
    with pytest.raises(ProgramError, match="parts that begin at op 0 and one after another"):
        validate(replace(program, ranks=(bad,)))


@pytest.mark.parametrize("line", ["part forwards", "part forward x", "part", "part optimizer 1 2"])
def test_a_part_of_another_name_does_not_parse(line: str) -> None:
    text = str(plan(load(ROOT / "scenarios/parity/zero3-mlp-4.toml"), device="cpu"))
    with pytest.raises(ProgramError):
        parse(text.replace("part backward", line, 1))


def test_construction_has_no_parts() -> None:
    text = str(plan(load(ROOT / "scenarios/parity/zero3-mlp-4.toml"), device="cpu"))
    with pytest.raises(ProgramError, match="no part of construction"):
        parse(text.replace("phase construction", "phase construction\npart forward", 1))


# -- in a Run


def simulated() -> RunRecord:
    return SimBackend("cpu").run(
        load(ROOT / "scenarios/parity/fsdp2-mlp-4.toml"), options=RunOptions()
    )


def test_a_run_names_its_parts_and_its_figures_the_highest_of_each(tmp_path: Path) -> None:
    run, case = simulated(), load(ROOT / "scenarios/parity/fsdp2-mlp-4.toml")
    peaks = figures(run, case).peak_memory_by_part
    assert tuple(peaks) == PARTS
    assert max(peaks.values()) == figures(run, case).peak_memory_bytes
    saved.save(run, tmp_path / "run.json")
    assert saved.load(tmp_path / "run.json") == run


def with_parts(run: RunRecord, *parts: PartRecord, **provenance: str) -> RunRecord:
    """`run` with other parts of rank 0's steady step."""
    first, *rest = run.ranks
    steady = first.phases["steady"]
    changed = replace(steady, memory=replace(steady.memory, parts=parts))
    ranks = (replace(first, phases={**first.phases, "steady": changed}), *rest)
    return replace(run, ranks=ranks, backend="real", provenance={**run.provenance, **provenance})


def test_a_saved_run_without_parts_is_still_read_and_says_what_it_does_not_tell(
    tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    saved.save(simulated(), path)
    lines = path.read_text().replace('"parts"', '"was_parts"')
    path.write_text(lines)
    with pytest.raises(saved.SavedRunError, match=r"memory\.was_parts: expected no such key"):
        saved.load(path)
    bare = with_parts(with_parts(simulated()))
    phases = {
        name: replace(p, memory=replace(p.memory, parts=()))
        for name, p in bare.ranks[0].phases.items()
    }
    bare = replace(bare, ranks=(replace(bare.ranks[0], phases=phases),))
    assert next(check for check in compare(simulated(), bare) if check.name == NAME).status == (
        "unsupported"
    )


def test_a_part_above_its_phase_breaks_a_law() -> None:
    run = simulated()
    peak = run.ranks[0].phases["steady"].memory.peak_bytes
    assert run_laws.run_breaches(run) == ()
    for part in (PartRecord("forward", 0, 1, peak + 1), PartRecord("forward", 0, 2, 1)):
        assert any(
            breach.startswith("parts lie in their phase")
            for breach in run_laws.run_breaches(with_parts(run, part))
        )


# -- compared


def checked(predicted: MemoryRecord, measured: MemoryRecord, *, exact: bool) -> Check:
    return compare_parts(
        [StepMemory(rank=3, phase="steady", predicted=predicted, measured=measured)], exact=exact,
        bound=0.05,
    )


def test_equal_parts_are_exact_and_counted() -> None:
    parts = record(("forward", 10, 30), ("backward", 20, 50))
    check = checked(parts, parts, exact=True)
    assert (check.status, check.relative_error) == ("ok", 0.0)
    assert check.detail == (
        "exact    4 of 4 starts and peaks of forward, backward, optimizer and zero_grad"
    )


@pytest.mark.parametrize(
    ("exact", "peak", "status"),
    [(True, 1001, "failed"), (False, 1001, "ok"), (False, 1100, "failed")],
)
def test_where_memory_follows_the_host_one_byte_fails_and_elsewhere_the_bound_does(
    exact: bool, peak: int, status: str
) -> None:
    check = checked(record(("forward", 10, 1000)), record(("forward", 10, peak)), exact=exact)
    assert check.status == status
    assert (
        f"1 of 2 exact; peak of forward 0, rank 3, steady: predicted 1,000 B, measured {peak:,} B"
        in check.detail
    )


def test_other_parts_fail_and_none_are_unsupported() -> None:
    forward, both = record(("forward", 1, 2)), record(("forward", 1, 2), ("optimizer", 1, 2))
    assert checked(forward, both, exact=False).detail == (
        "rank 3, steady: parts forward 0 predicted, forward 0 optimizer measured"
    )
    assert (
        checked(record(), forward, exact=True).status
        == checked(forward, record(), exact=True).status
        == ("unsupported")
    )


def test_a_start_where_nothing_was_measured_is_not_divided_by() -> None:
    check = checked(record(("forward", 1, 2)), record(("forward", 0, 0)), exact=False)
    assert (check.status, check.relative_error) == ("failed", float("inf"))


def test_a_start_is_held_to_a_share_of_the_steps_peak_where_other_threads_free() -> None:
    check = checked(record(("zero_grad", 100, 1000)), record(("zero_grad", 140, 1000)), exact=False)
    assert (check.status, check.relative_error) == ("ok", -0.04)
    assert check.detail.startswith("within 5% of the step's peak: 1 of 2 exact; start of "
                                   "zero_grad, rank 3, steady")


def test_a_measured_run_that_follows_the_host_is_compared_exactly() -> None:
    run = simulated()
    steady = run.ranks[0].phases["steady"].memory
    off = [replace(part, start_bytes=part.start_bytes - 1) for part in steady.parts]
    for provenance, status in (({"memory": EXACT}, "failed"), ({}, "ok")):
        checks = compare(run, with_parts(run, *off, **provenance))
        assert next(check for check in checks if check.name == NAME).status == status
