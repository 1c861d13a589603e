"""A device that is fuller than what a step reserves: TIGHT is what runs by giving back what is
cached, OOM what fails in spite of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zsim.analysis.advice import advice, way_of
from zsim.analysis.alternatives import moved
from zsim.analysis.fit.fit import recommend
from zsim.analysis.fit.fit_table import Candidate
from zsim.analysis.hiding.hide_communication import Change, hiding
from zsim.cli.main import main
from zsim.cli.reports.memory_report import print_advice, verdict_words
from zsim.cluster.cluster_presets import load_cluster
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Op
from zsim.ir.program import Program, RankProgram
from zsim.memory.allocator import reserved
from zsim.memory.allocator.caching_allocator import DeviceFullError
from zsim.memory.allocator.out_of_memory import Pressure, Releases, pressure
from zsim.memory.allocator.reserved import AllocatorRecord
from zsim.memory.fits import BytesBand, MemoryVerdict, assess, assess_program
from zsim.memory.non_torch import capacity, cublas_workspace, outside, total
from zsim.scenario import plan
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario, parse

MIB = 2**20
LLAMA_8B = """
model = { preset = "llama-3-8b" }
batch = { micro_batch = 1, sequence_length = 4096 }
cluster = { preset = "dgx-a100-40", nodes = 1 }
strategy = { name = "fsdp2" }
precision = { parameters = "bf16", reduce = "fp32" }
"""
"""45 GiB with all that it would cache, on 39.5 GiB."""
LLAMA_1B = """
model = { preset = "llama-3.2-1b" }
batch = { micro_batch = 4, sequence_length = 8192 }
cluster = { preset = "dgx-a100", nodes = 1 }
strategy = { name = "zero1" }
precision = { parameters = "bf16", reduce = "fp32" }
"""
"""72 GiB live at most, but the logits find no 8 GiB in one piece."""


def scenario(text: str) -> Scenario:
    return parse(text.encode(), where="pressure.toml")


def replayed(case: Scenario, verdict: MemoryVerdict, capacity: int) -> dict[str, AllocatorRecord]:
    rank_program = plan.plan(case, device="cuda").of_rank(verdict.rank)
    workspace = cublas_workspace(case.cluster.device)
    return dict(reserved.replay(
        rank_program, capacity=capacity, workspace_bytes=workspace, empty_cache="first"
    ))


def rooms(verdict: MemoryVerdict) -> tuple[int, int]:
    """Bytes for the allocator: as expected, and the most there may be."""
    beyond = total(verdict.outside)
    return verdict.capacity.nbytes - beyond.nbytes, verdict.capacity.high - beyond.low


def test_what_fits_once_cached_memory_is_given_back_is_tight_and_says_how_often() -> None:
    case = scenario(LLAMA_8B)
    verdict = assess(planned(case))
    records = replayed(case, verdict, rooms(verdict)[0])
    assert verdict.margin_bytes < 0
    assert (verdict.verdict, verdict.releases_per_step) == ("TIGHT", records["steady"].num_releases)
    assert verdict.pressure == Pressure(expected=Releases(
        first=records["first"].num_releases, steady=records["steady"].num_releases
    ))
    sentence = verdict_words(verdict)
    assert "short" not in sentence
    assert (
        "to keep all that it caches; runs, flushing cached memory twice a steady step, which "
        "stalls the device"
        in sentence
    )
    assert sentence.endswith("stalls the device")
    assert verdict_words(verdict, 9_000_000).endswith("stalls the device and takes 9.000 ms of it")


def test_what_fails_with_all_cached_memory_given_back_is_out_of_memory() -> None:
    case = scenario(LLAMA_1B)
    verdict = assess(planned(case))
    assert verdict.needed.low < verdict.capacity.low
    for room in rooms(verdict):
        with pytest.raises(DeviceFullError):
            replayed(case, verdict, room)
    assert (verdict.verdict, verdict.releases_per_step) == ("OOM", None)
    assert verdict.pressure is not None
    assert (
        f"short: full at {verdict.pressure.full_at} although all cached memory is given back, even "
        f"with"
        in verdict_words(verdict)
    )
    assert verdict.pressure.full_at == "backward root of the first step"


def test_where_all_that_is_cached_is_expected_to_have_room_nothing_is_asked() -> None:
    roomy = assess(planned(scenario(LLAMA_1B.replace("micro_batch = 4", "micro_batch = 1"))))
    assert (roomy.verdict, roomy.pressure, roomy.releases_per_step, roomy.running) == (
        "FITS", None, 0, "",
    )
    hopeless = assess(planned(moved(scenario(LLAMA_8B), "ddp")))
    assert (hopeless.verdict, hopeless.pressure, hopeless.releases_per_step, hopeless.running) == (
        "OOM", None, None, "",
    )


def _program() -> RankProgram:
    """Caches 60 MiB on one stream that another cannot use."""

    def op(index: int, stream: str, *memory: Alloc | Free) -> Op:
        return Op(index=index, kind="copy", unit="root", stream=stream, memory=memory)  # type: ignore[arg-type]

    made = op(
        0, "compute", Alloc("p", "parameters", 20 * MIB), Alloc("twice", "temporaries", 100 * MIB),
        Free("twice"),
    )
    step = (
        op(0, "compute", Alloc("x", "activations", 60 * MIB), Free("x")),
        op(1, "all_gather", Alloc("y", "communication", 40 * MIB), Free("y")),
    )
    return RankProgram(construction=(made,), first=step, steady=step)


@pytest.mark.parametrize(("room", "most", "expected"), [
    (120, 120, Pressure(expected=Releases(first=0, steady=0))),
    # the model is built elsewhere: 120 MiB are not there
    (100, 120, Pressure(expected=Releases(first=1, steady=2))),
    (70, 100, Pressure(
        expected=None, best=Releases(first=1, steady=2), full_at="copy root of the first step"
    )),
    (70, 75, Pressure(expected=None, full_at="copy root of the first step")),
])
def test_it_runs_as_expected_or_at_best_or_never(room: int, most: int, expected: Pressure) -> None:
    outcome = pressure(
        _program(), room=room * MIB, most=most * MIB, workspace_bytes=0, expandable_segments=False
    )
    assert outcome == expected


def test_the_least_outside_and_the_most_there_may_be_is_asked_where_it_may_not_run() -> None:
    """Live bytes alone are between the room that is expected and the most there may be."""
    cluster = load_cluster("dgx-h100", ranks=1)
    context = total(outside(_alone(MIB), cluster))
    there = capacity(cluster.device)
    verdict = assess_program(_alone(there.nbytes - context.low - 100 * MIB), cluster)
    assert (verdict.verdict, verdict.releases_per_step) == ("TIGHT", None)
    assert verdict.pressure == Pressure(
        expected=None, best=Releases(first=0, steady=0), full_at="copy root of the first step"
    )
    assert verdict.running == "not expected to run"
    assert verdict_words(verdict).endswith("is given back; with the least outside torch's bytes it "
                                         "runs")
    assert assess_program(_alone(there.high - context.low - 100 * MIB), cluster).verdict == "TIGHT"
    assert assess_program(_alone(there.high - context.low + MIB), cluster).verdict == "OOM"


def _alone(nbytes: int) -> Program:
    """A Program of one rank, which holds `nbytes` for a moment of each step."""
    op = Op(
        index=0, kind="copy", unit="root", stream="compute",
        memory=(Alloc("x", "activations", nbytes), Free("x")),
    )
    return Program(
        mesh=Mesh(), ranks=(RankProgram(construction=(), first=(op,), steady=(op,)),),
        assignment=(0,),
    )


def test_releases_are_said_of_the_steady_step_or_else_of_the_first() -> None:
    sentences = [
        Releases(first=first, steady=steady).sentence
        for first, steady in ((5, 1), (5, 2), (5, 3), (1, 0), (0, 0))
    ]
    assert [sentence.removeprefix("flushing cached memory ") for sentence in sentences] == [
        "once a steady step", "twice a steady step", "3 times a steady step",
        "once in the first step", "",
    ]


def tight(name: str, pressed: Pressure | None, time: int) -> Candidate:
    needed = BytesBand(nbytes=90 if pressed is None else 110, low=80, high=120)
    case = scenario(LLAMA_1B)
    made = replace(
        assess(planned(case)), needed=needed, capacity=BytesBand(nbytes=100, low=100, high=100),
        pressure=pressed,
    )
    assert made.verdict == "TIGHT"
    return Candidate(
        name=name, scenario=case, memory=made, step_time_ns=time, step_time_band_ns=(time, time)
    )


def test_of_what_is_tight_that_which_runs_smoothest_is_recommended_first() -> None:
    least = tight(
        "least", Pressure(expected=None, best=Releases(first=0, steady=1), full_at="x"), 1
    )
    stalls = tight("stalls", Pressure(expected=Releases(first=1, steady=3)), 2)
    keeps = tight("keeps", None, 3)
    assert recommend((least, stalls, keeps))[0] is keeps
    assert (keeps.memory.running, stalls.memory.running) == ("", "flushing cached memory 3 "
                                                                 "times a steady step")
    assert recommend((least, stalls, keeps))[1].startswith(
        "the fastest of 1 (of 3) that may just fit, "
    )
    chosen, reason = recommend((least, stalls))
    assert chosen is stalls
    assert reason.startswith("the fastest of 1 (of 2) that run only by giving back what they "
                             "cache, 2 ns a step, flushing cached memory 3 times a steady step")
    assert recommend((least,))[1].startswith("the fastest of 1 (of 1) that may run with the "
                                             "least outside torch's bytes, ")
    at_best = (
        "short: full at x although all cached memory is given back; with the least outside "
        "torch's bytes it runs, flushing"
    )
    assert at_best in verdict_words(least.memory)


def test_fit_and_show_say_what_is_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pressure.toml"
    file.write_text(LLAMA_8B)
    verdict = assess(planned(scenario(LLAMA_8B)))
    assert main(["fit", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (
        note
        for row, note in zip(lines, lines[1:], strict=False)
        if row.split()[0] == "TIGHT" and row.split()[-1] == "fsdp2"
    )
    assert "flushing cached memory twice a steady step" in line
    assert main(["fit", str(file), "--json"]) == 0
    (candidate,) = (
        candidate for candidate in json.loads(capsys.readouterr().out)["candidates"]
        if candidate["name"] == "fsdp2"
    )
    assert candidate["releases_per_step"] == verdict.releases_per_step
    assert main(["show", str(file), "--memory", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (
        shown["releases_per_step"]
        == shown["pressure"]["expected"]["steady"]
        == verdict.releases_per_step
    )


def test_what_is_not_expected_but_possible_is_said_with_how_much_it_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NCCL's shared network buffers: no step of the waterfall, as none are expected, yet in the
    band where nodes talk, and there alone."""
    for nodes, is_said in ((1, False), (2, True)):
        file = tmp_path / "nodes.toml"
        file.write_text(LLAMA_1B.replace("nodes = 1", f"nodes = {nodes}"))
        assert main(["show", str(file), "--memory"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        _, _, line = text.partition("not confirmed on a GPU yet")
        assert (
            "NCCL shared network buffers, dp_shard (none expected, up to 512.00 MiB)" in line
        ) is is_said
        assert ("shared network" in line) is is_said


def test_advice_that_leads_to_what_is_tight_says_what_is_given_back(
    capsys: pytest.CaptureFixture[str]
) -> None:
    (effect,) = (
        each for each in advice(way_of((), planned(scenario(LLAMA_8B))))
        if each.change == "fused optimizer"
    )
    assert (effect.verdict, effect.releases_per_step) == ("TIGHT", 2)
    print_advice([effect])
    assert (
        "then TIGHT, flushing cached memory twice a steady step, peak in"
        in " ".join(capsys.readouterr().out.split())
    )


def test_a_proposal_of_what_to_change_says_what_it_has_to_give_back() -> None:
    text = LLAMA_8B.replace("nodes = 1", "nodes = 2").replace("length = 4096", "length = 4608")
    changes = hiding(planned(scenario(text))).changes
    (links,) = (change for change in changes if change.label == "links 4 times as fast")
    assert (links.memory, links.released) == ("TIGHT", "flushing cached memory once a steady "
                                                       "step")


def test_a_proposal_that_hides_says_what_it_has_to_give_back_for_that() -> None:
    change = Change(
        label="x", ns_per_token=1.0, exposed=0.0, memory="TIGHT", needed_bytes=110 * MIB,
        capacity_bytes=100 * MIB,
    )
    assert change.memory_words.startswith("may not fit: needs 110")
    released = replace(change, released=Releases(first=0, steady=2).sentence).memory_words
    assert released.startswith("runs only flushing cached memory twice a steady step: needs 110")
    assert "short" not in released
