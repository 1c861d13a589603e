"""Public laws of Runs: they hold on random scenarios, and each finds the defect it is there for.

Users add their own, and the plugin asks them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import zsim
from tests.support.cases.sampling import WHOLE
from tests.support.folders import PARITY, ROOT
from zsim.errors import ArgumentError
from zsim.ir.run import RankRun
from zsim.runs.run import Run
from zsim.testing import strategies
from zsim.testing.laws import LAWS, LawError, breaches, check_laws, law, of_runs

pytest_plugins = ["pytester"]
ENDING = [
    file for file in sorted((ROOT / "scenarios").rglob("*.toml"))
    if "ends = false" not in file.read_text()
]


@WHOLE
@given(strategies.scenarios())
def test_every_run_of_all_ranks_obeys_what_is_asked_of_each_run(scenario: zsim.Scenario) -> None:
    run = zsim.simulate(scenario, all_ranks=True)
    assert check_laws(run, simulating=False) == sum(not each.simulates for each in LAWS.values())


@pytest.mark.parametrize("file", ENDING, ids=lambda file: file.stem)
def test_every_scenario_of_the_project_keeps_what_it_expects_and_obeys_the_laws(file: Path) -> None:
    run = zsim.simulate(zsim.load(file))
    assert {verdict.ok for verdict in run.expectations} == {True}
    assert check_laws(run, simulating=False) > 5


@pytest.fixture(scope="module")
def whole() -> Run:
    """A Run that shows each of its four ranks."""
    return zsim.simulate(zsim.load(PARITY / "zero3-mlp-4.toml"), all_ranks=True)


def broken(run: Run, **changes: Any) -> Run:
    """`run` with other fields of its record."""
    return replace(run, record=replace(run.record, **changes))


def first_rank(run: Run, change: Callable[[RankRun], RankRun]) -> Run:
    first, *others = run.record.ranks
    return broken(run, ranks=(change(first), *others))


def with_memory(rank: RankRun, phase: str = "steady", **levels: Any) -> RankRun:
    record = rank.phases[phase]
    changed = replace(record, memory=replace(record.memory, **levels))
    return replace(rank, phases={**rank.phases, phase: changed})


def with_collective(rank: RankRun, index: int, **more: Any) -> RankRun:
    steady = rank.phases["steady"]
    collectives = list(steady.collectives)
    collectives[index] = replace(collectives[index], **more)
    changed = replace(steady, collectives=tuple(collectives))
    return replace(rank, phases={**rank.phases, "steady": changed})


def with_span(rank: RankRun, index: int, **more: Any) -> RankRun:
    spans = list(rank.spans)
    spans[index] = replace(spans[index], **more)
    return replace(rank, spans=tuple(spans))


def gather(rank: RankRun, number: int = 0) -> int:
    """Index of the span of an all-gather."""
    return [i for i, span in enumerate(rank.spans) if span.kind == "all_gather"][number]


def squeezed(rank: RankRun) -> RankRun:
    """All collectives in one nanosecond each, one after another: no link is so fast."""
    spans = [
        replace(span, end_ns=span.start_ns + 1) if span.group else span for span in rank.spans
    ]
    return replace(rank, spans=tuple(spans))


def held(rank: RankRun, kind: str, more: int) -> RankRun:
    now = dict(rank.phases["steady"].memory.held)
    return with_memory(rank, held={**now, kind: now[kind] + more})


DEFECTS: dict[str, tuple[Callable[[Run], Run], str]] = {
    "one thing at a time": (
        lambda run: first_rank(run, lambda rank: with_span(rank, gather(rank, 1), start_ns=0)),
        "rank 0: ",
    ),
    "bytes sent are received": (
        lambda run: first_rank(run, lambda rank: replace(rank, bytes_sent=rank.bytes_sent + 1)),
        "all ranks: 1,218,625 B sent, of 1,218,624 B that are to be received",
    ),
    "steps return the memory they take": (
        lambda run: first_rank(run, lambda rank: with_memory(rank, end_bytes=76_184)),
        "rank 0: a steady step begins with 76,180 B and ends with 76,184 B",
    ),
    "members issue alike": (
        lambda run: first_rank(run, lambda rank: with_collective(rank, 1, nbytes=33_412)),
        "rank 1: steady collective 1 of dp_shard is all_gather of 33,408 B from root 0, and "
        "all_gather of 33,412 B from root 0 on rank 0",
    ),
    "spans are what was issued": (
        lambda run: first_rank(
            run, lambda rank: with_span(rank, gather(rank), kind="reduce_scatter")
        ),
        "rank 0: ",
    ),
    "streams keep the order of issue": (
        lambda run: first_rank(
            run, lambda rank: with_span(rank, gather(rank), start_ns=10**9, end_ns=10**9)
        ),
        "rank 0: all_gather blocks.1 starts at ",
    ),
    "links carry no more than they can": (
        lambda run: first_rank(run, squeezed), "rank 0: all_gather blocks.0 in 1 ns from ",
    ),
    "steps are as long as their streams": (
        lambda run: broken(run, step_time_ns=1), "rank 0: ",
    ),
    "states follow zeros table": (
        lambda run: first_rank(run, lambda rank: held(rank, "optimizer_states", 4)),
        "rank 0: 50,796 B of optimizer_states when the optimizer has stepped, and 50,792 B by "
        "ZeRO's table",
    ),
}


@pytest.mark.quality
@pytest.mark.parametrize("name", DEFECTS)
def test_a_law_names_rank_and_numbers_of_the_defect_that_it_is_for(whole: Run, name: str) -> None:
    change, told = DEFECTS[name]
    told_of = [text for text in breaches(change(whole), simulating=False) if text.startswith(name)]
    assert told_of
    assert told_of[0].startswith(f"{name}: {told}")
    with pytest.raises(LawError, match="obeys the laws of zsim.testing.laws, found "):
        check_laws(change(whole))


def test_a_step_shorter_than_its_flops_at_the_peak_has_an_hfu_above_one(whole: Run) -> None:
    (told,) = of_runs.utilization_has_its_bounds(broken(whole, step_time_ns=1))
    assert told.startswith("HFU ")
    assert not list(of_runs.utilization_has_its_bounds(whole))


def test_every_law_of_each_run_has_a_defect_here() -> None:
    cheap = {name for name, each in LAWS.items() if not each.simulates}
    assert cheap - DEFECTS.keys() == {"records are possible"}  # which asks those of records


def test_laws_are_left_out_by_name_and_an_unknown_name_is_refused(whole: Run) -> None:
    change, _ = DEFECTS["bytes sent are received"]
    assert check_laws(change(whole), without=("bytes sent are received",)) == len(LAWS) - 1
    with pytest.raises(ArgumentError, match="without: expected records are possible, .*'bytes'"):
        check_laws(whole, without=("bytes",))
    with pytest.raises(ArgumentError, match="run: expected a Run"):
        check_laws(whole.record)  # type: ignore[arg-type]


def test_a_law_of_a_users_own_is_asked_and_its_name_is_taken_once(whole: Run) -> None:
    try:
        @law
        def no_step_is_short(run: Run) -> Iterator[str]:
            yield f"all ranks: a step of {run.step_time}"

        with pytest.raises(LawError, match="found no step is short: all ranks: a step of "):
            check_laws(whole)
        with pytest.raises(ArgumentError, match="a function whose name no law has"):
            @law(simulates=True)
            def no_step_is_short(run: Run) -> Iterator[str]:
                yield ""
    finally:
        LAWS.pop("no step is short", None)


def gives_nothing(run: Run) -> None:
    """A law that forgets to yield."""


def gives_a_verdict(run: Run) -> bool:
    return run.world_size > 100


def gives_a_text(run: Run) -> str:
    return "too short"


def yields_a_number(run: Run) -> Iterator[int]:
    yield 3


@pytest.mark.parametrize(("own", "found"), [
    (gives_nothing, "None"), (gives_a_verdict, "False"), (gives_a_text, '"too short"'),
    (yields_a_number, "3"),
])
def test_a_law_that_yields_no_text_is_refused_by_its_name(
    whole: Run, own: Any, found: str
) -> None:
    name = own.__name__.replace("_", " ")
    try:
        law(own)
        with pytest.raises(ArgumentError) as caught:
            check_laws(whole, simulating=False)
        assert str(caught.value).startswith(
            f"law {name}: expected each breach as text, or none, found {found}; write yield"
        )
    finally:
        LAWS.pop(name, None)


def test_an_error_inside_a_law_names_the_law_and_the_run(whole: Run) -> None:
    def steps_are_quick(run: Run) -> Iterator[str]:
        assert run.step_time == 0, "a slow step"
        yield from ()

    try:
        law(steps_are_quick)
        with pytest.raises(AssertionError, match="a slow step") as caught:
            check_laws(whole, simulating=False)
        told = f"in the law steps are quick, of the run {whole.record.scenario}"
        assert caught.value.__notes__ == [told]
    finally:
        LAWS.pop("steps are quick", None)


def test_a_law_is_a_function() -> None:
    with pytest.raises(ArgumentError, match="law: expected a function of a Run, found 3; @law"):
        law(3)  # type: ignore[call-overload]


def test_the_page_lists_every_law_and_its_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "zsim" / "testing" / "laws" / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert [row for row in rows if not row.startswith("law ")] == list(LAWS)
    (tmp_path / "mine.toml").write_text((PARITY / "fsdp2-mlp-4.toml").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    example: dict[str, Any] = {}
    try:
        exec(page.partition("```python\n")[2].partition("```")[0], example)
        example["test_laws"]()
    finally:
        LAWS.pop("nothing is all reduced", None)


def test_the_plugin_asks_the_laws_of_each_run_and_a_users_own(sessions) -> None:
    sessions.scenario("zero3-mlp-4")
    sessions.tests('''
from zsim.testing import law

@law
def nothing_is_gathered(run):
    if count := run.collectives.count("all_gather"):
        yield f"rank 0: {int(count)} all-gathers"

@pytest.mark.zero(scenario="scenarios/zero3-mlp-4.toml")
def test_it(zero):
    zero.run()
''')
    try:
        result = sessions.run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["E *found nothing is gathered: rank 0: 8 all-gathers"])
    finally:
        LAWS.pop("nothing is gathered", None)


def test_a_real_run_is_asked_nothing_that_simulates(whole: Run) -> None:
    real = broken(whole, interpreter="executor", backend="gloo")
    assert check_laws(real) == sum(not each.simulates for each in LAWS.values())


