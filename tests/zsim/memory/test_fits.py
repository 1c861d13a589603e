"""Memory verdicts: FITS, TIGHT and OOM, waterfalls that add up, computed advice, and the least
stage that fits."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.cases.sampling import WHOLE
from tests.support.closed_forms import MIXED_ADAM
from tests.support.folders import SCENARIOS
from zsim.analysis.advice import Effect, advice, way_of
from zsim.analysis.alternatives import changes
from zsim.analysis.fit.fit import fit, recommend
from zsim.analysis.fit.fit_table import Candidate
from zsim.cli.main import main
from zsim.cli.reports.memory_report import finding
from zsim.cluster.cluster_presets import load_cluster
from zsim.io.units import format_bytes
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Op
from zsim.ir.program import Program, RankProgram
from zsim.memory import fits as answers
from zsim.memory import formulas
from zsim.memory.allocator import reserved as allocator
from zsim.memory.fits import (
    BytesBand,
    MemoryVerdict,
    assess_program,
    ridges,
)
from zsim.memory.holdings import holdings, live_at_peak
from zsim.memory.inputs_and_buffers import belongings
from zsim.memory.non_torch import total
from zsim.memory.waterfall import formula_bytes, formula_text, waterfall
from zsim.scenario import plan
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario, load, parse
from zsim.testing.strategies import scenarios

LLAMA = str(SCENARIOS / "published/llama-3-8b-8-h100.toml")


def scenario(
    strategy: str = 'name = "fsdp2"', *, model: str = "gpt-2-124m", cluster: str = "dgx-h100",
    ranks: int = 0, micro: int = 2, accumulation: int = 1, precision: str = "bf16", more: str = "",
) -> Scenario:
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = {micro}, sequence_length = 128, accumulation = {accumulation} }}
cluster = {{ preset = "{cluster}"{f", ranks = {ranks}" if ranks else ""} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{precision}", reduce = "fp32" }}
{more}
"""
    return parse(text.encode(), where="answer.toml")


def of(case: Scenario) -> MemoryVerdict:
    program = plan.plan(case, device=case.cluster.kind)
    return assess_program(
        program, case.cluster, expandable_segments=case.expandable_segments,
        besides=belongings(case),
    )


# -- the answer


@WHOLE
@given(scenarios())
def test_every_answer_adds_up(case: Scenario) -> None:
    """Live buffers at the peak are the peak, kind by kind; the waterfall's steps sum to its totals;
    bands hold what they band."""
    verdict = of(case)
    held = holdings(planned(case).program.of_rank(verdict.rank), verdict.phase)
    assert (
        sum(holding.nbytes for holding in held)
        == sum(verdict.by_kind.values())
        == verdict.allocated_bytes
    )
    assert verdict.allocated_bytes <= verdict.reserved_bytes
    assert (
        verdict.allocated_bytes
        + verdict.workspace_bytes
        + verdict.rounding_bytes
        + verdict.cached_bytes
        == verdict.reserved_bytes
    )
    assert verdict.needed.low <= verdict.needed.nbytes <= verdict.needed.high
    assert verdict.capacity.low <= verdict.capacity.nbytes <= verdict.capacity.high
    so_far = 0
    for stage in waterfall(case, verdict):
        if stage.total:
            assert stage.nbytes == so_far
        else:
            so_far += stage.nbytes
    assert so_far == verdict.needed.nbytes


@WHOLE
@given(scenarios())
def test_the_highest_ridge_is_the_peak_and_what_lives_there_is_a_subset_of_what_was_made(
    case: Scenario
) -> None:
    program = plan.plan(case, device=case.cluster.kind)
    verdict = assess_program(program, case.cluster)
    rank = program.of_rank(verdict.rank)
    record = replay(rank)[verdict.phase]
    last = max((op.index for op in rank.phase(verdict.phase) if op.kind == "optimizer"), default=0)
    if not any(op.memory for op in rank.phase(verdict.phase)[last + 1 :] if op.kind != "free"):
        assert max(nbytes for _, nbytes in ridges(rank, verdict.phase)) == max(
            record.peak_bytes, record.start_bytes
        )
    assert {alloc.buffer for alloc, _ in live_at_peak(rank, verdict.phase)} <= {
        event.buffer for phase in (rank.construction, rank.first, rank.second, rank.steady)
        for op in phase for event in op.memory
    }


def test_a_cpu_host_has_no_allocator_and_only_the_batch_outside() -> None:
    verdict = of(scenario(cluster="cpu-gloo", more=""))
    assert [item.name for item in verdict.outside] == ["inputs"]
    batch = verdict.outside[0].nbytes
    assert (
        verdict.reserved_bytes
        == verdict.allocated_bytes
        == verdict.needed.low - batch
        == verdict.needed.high - 2 * batch
    )


@pytest.mark.parametrize(("needed", "verdict"), [
    ((10, 5, 20), "FITS"), ((10, 5, 96), "TIGHT"), ((120, 101, 130), "TIGHT"),
    ((120, 106, 130), "OOM"), ((94, 90, 95), "FITS"),
])
def test_a_verdict_is_sure_only_where_the_bands_do_not_meet(
    needed: tuple[int, int, int], verdict: str
) -> None:
    nbytes, low, high = needed
    banded = replace(
        of(scenario()), needed=BytesBand(nbytes=nbytes, low=low, high=high),
        capacity=BytesBand(nbytes=100, low=95, high=105),
    )
    assert (banded.verdict, banded.margin_bytes) == (verdict, 100 - nbytes)


def test_the_least_that_is_needed_is_what_lives_and_the_most_is_all_that_is_reserved() -> None:
    """The allocator gives back what is cached before it says that the device is full."""
    verdict = of(scenario())
    beyond = total(verdict.outside)
    assert verdict.cached_bytes > 0
    assert verdict.needed == BytesBand(
        nbytes=verdict.reserved_bytes + beyond.nbytes,
        low=verdict.reserved_bytes - verdict.cached_bytes + beyond.low,
        high=verdict.reserved_bytes + beyond.high,
    )


def test_construction_is_that_of_the_rank_that_needs_most() -> None:
    def rank(built: int, peak: int) -> RankProgram:
        made = Op(
            index=0, kind="alloc", unit="root", stream="host",
            memory=(Alloc("p", "parameters", built),),
        )
        ran = Op(
            index=0, kind="forward", unit="root", stream="compute",
            memory=(Alloc("x", "activations", peak), Free("x")),
        )
        return RankProgram(construction=(made,), first=(ran,), steady=(ran,))

    program = Program(
        mesh=Mesh(dp_replicate=3), ranks=(rank(900, 10), rank(300, 5000)), assignment=(0, 1, 1)
    )
    verdict = assess_program(program, load_cluster("cpu-gloo", ranks=3))
    assert (verdict.rank, verdict.construction_bytes, verdict.allocated_bytes) == (1, 300, 5300)


HUGE = """
model = { preset = "llama-3-70b", num_layers = 26 }
batch = { micro_batch = 1, sequence_length = 1024, accumulation = 2 }
activation_checkpointing = { mode = "full" }
cluster = { preset = "dgx-h100", nodes = 8 }
strategy = { name = "fsdp2", dp_shard = 64 }
precision = { parameters = "bf16", reduce = "fp32" }
"""
"""Built unit by unit, which an H100 has room for."""
ONE_UNIT = """
model = { preset = "llama-3-70b", num_layers = 10 }
wrapping = { every = "all" }
batch = { micro_batch = 1, sequence_length = 64 }
activation_checkpointing = { mode = "full" }
cluster = { preset = "dgx-h100", nodes = 8 }
strategy = { name = "fsdp1", dp_shard = 64 }
precision = { parameters = "bf16", reduce = "bf16" }
"""
"""80 GiB in float32 where its only unit is built and joined, which an H100 has no room for."""


@pytest.mark.parametrize(
    ("text", "on_device", "expandable"),
    [(HUGE, True, False), (HUGE, True, True), (ONE_UNIT, False, True)],
)
def test_the_snapshot_shows_what_the_verdict_assumes(
    text: str, on_device: bool, expandable: bool, tmp_path: Path
) -> None:
    """Played from its beginning, its steps reserve and allocate what `--memory` says; it never
    holds more than the device has."""
    more = "allocator = { expandable_segments = true }\n" if expandable else ""
    (tmp_path / "huge.toml").write_text(text + more)
    file = tmp_path / "huge.pickle"
    assert main(["show", str(tmp_path / "huge.toml"), "--snapshot", str(file)]) == 0
    verdict = of(load(tmp_path / "huge.toml"))
    assert verdict.built_on_device is on_device
    reserved = allocated = built = 0
    peaks = {"reserved": 0, "allocated": 0}
    for event in pickle.loads(file.read_bytes())["device_traces"][0]:
        sign = {
            "alloc": 1, "segment_alloc": 1, "segment_map": 1, "free_completed": -1,
            "segment_free": -1, "segment_unmap": -1,
        }
        change = sign.get(event["action"], 0) * event["size"]
        reserved += change if event["action"].startswith("segment") else 0
        allocated += 0 if event["action"].startswith("segment") else change
        if any(frame["filename"] == "construction" for frame in event["frames"]):
            built = max(built, allocated)
        else:
            peaks = {
                "reserved": max(peaks["reserved"], reserved),
                "allocated": max(peaks["allocated"], allocated),
            }
        assert reserved <= verdict.capacity.nbytes
    assert peaks["reserved"] == verdict.reserved_bytes
    idle = verdict.cached_bytes + verdict.rounding_bytes
    assert peaks["allocated"] == verdict.reserved_bytes - idle
    assert (built == verdict.construction_bytes) is on_device


def test_what_is_assumed_of_construction_is_said_beside_what_is_reserved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, assumption in (
        (ONE_UNIT, "that the model is built elsewhere, on the meta device"),
        (HUGE, "torch.cuda.empty_cache() once the model is built"),
    ):
        (tmp_path / "huge.toml").write_text(text)
        assert main(["show", str(tmp_path / "huge.toml"), "--memory"]) == 0
        _, _, reserved = " ".join(capsys.readouterr().out.split()).partition("= reserved")
        assert f"torch's caching allocator; assumes {assumption}" in reserved


def test_the_peak_may_be_that_of_the_first_step() -> None:
    case = scenario(model="gpt-tiny", cluster="cpu-gloo", ranks=2)
    program = plan.plan(case, device="cpu")
    once = (Alloc("once", "temporaries", 10**9), Free("once"))
    ranks = []
    for rank in program.ranks:
        index = next(index for index, op in enumerate(rank.first) if op.kind == "forward")
        op = replace(rank.first[index], memory=(*once, *rank.first[index].memory))
        ranks.append(replace(rank, first=(*rank.first[:index], op, *rank.first[index + 1 :])))
    verdict = assess_program(replace(program, ranks=tuple(ranks)), case.cluster)
    assert (verdict.phase, verdict.peak_at.split()[0]) == ("first", "forward")
    assert verdict.allocated_bytes > 10**9
    assert of(case).phase == "steady"


def test_workspaces_of_cublas_are_a_step_of_the_waterfall_by_themselves() -> None:
    case = scenario()
    stages = {stage.name: stage.nbytes for stage in waterfall(case, of(case))}
    assert stages["cuBLAS workspaces"] == 64 * 2**20
    lives = allocator.replay(
        plan.plan(case, device="cuda").ranks[0], workspace_bytes=32 * 2**20, empty_cache="first"
    )
    most = max(lives[phase].peak_active_bytes for phase in answers.STEPS)
    assert stages["allocated"] + stages["cuBLAS workspaces"] + stages["rounding"] == most


def test_a_long_timeline_is_printed_in_few_lines_with_its_highest_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "huge.toml").write_text(HUGE)
    assert main(["show", str(tmp_path / "huge.toml"), "--memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(index for index, line in enumerate(lines) if "the highest from each 4 "
                                                              "computations to the next" in line)
    points = lines[title + 1 : lines.index("live buffers at the peak")]
    verdict = of(load(tmp_path / "huge.toml"))
    assert len(points) <= 48
    highest = max(points, key=lambda line: line.count("▇"))
    assert f" {format_bytes(verdict.allocated_bytes)}  ▇" in highest


# -- the formula


@pytest.mark.parametrize(("strategy", "precision", "text", "nbytes_per_parameter"), [
    ('name = "ddp"', "bf16", "16Ψ", 16.0), ('name = "ddp"', "fp32", "16Ψ", 16.0),
    ('name = "zero1"', "bf16", "4Ψ + 12Ψ/8", 5.5), ('name = "zero2"', "bf16", "2Ψ + 14Ψ/8", 3.75),
    ('name = "zero3"', "bf16", "16Ψ/8", 2.0), ('name = "fsdp2"', "bf16", "16Ψ/8", 2.0),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 4', "bf16", "16Ψ/4", 4.0),
    ('name = "zero_redundancy"', "bf16", "4Ψ + 4Ψ/8", 4.5),
])
def test_the_formula_is_the_literatures(
    strategy: str, precision: str, text: str, nbytes_per_parameter: float
) -> None:
    """Rajbhandari et al., arXiv 1910.02054, table 1: 16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N."""
    case = scenario(strategy, precision=precision)
    assert formula_text(case) == text
    assert formula_bytes(case) == pytest.approx(
        nbytes_per_parameter * case.model.num_parameters, rel=1e-6
    )


def test_the_states_of_a_steady_step_are_the_formulas_but_for_counters_and_padding() -> None:
    case = scenario('name = "zero1"')
    held = replay(plan.plan(case, device="cuda").ranks[0])["steady"].held
    expected = formulas.model_state_bytes(
        case.model.num_parameters, stage="zero1", num_ranks=8, state=MIXED_ADAM
    )
    assert 0 <= sum(held.values()) - expected < 10_000


def test_zero2_can_peak_above_zero1_and_zero3() -> None:
    """One bucket of everything: its whole gradient, the cast of it and its shard live at once
    (Megatron-LM#6314)."""
    first, two, three = (
        of(scenario(f'name = "zero{z}", granularity = "1 GiB"', micro=1)) for z in (1, 2, 3)
    )
    assert two.allocated_bytes > max(first.allocated_bytes, three.allocated_bytes)
    assert two.peak_at.startswith("reduce_scatter")


# -- what would help


@cache
def advice_on_llama() -> tuple[Effect, ...]:
    return advice(way_of((), planned(load(LLAMA))))


def test_every_piece_of_advice_is_what_planning_it_gives() -> None:
    case = load(LLAMA)
    before = of(case)
    by_name = dict(changes(case))
    for effect in advice_on_llama():
        after = of(by_name[effect.change])
        assert effect.saved_bytes == before.needed.nbytes - after.needed.nbytes
        assert (effect.needed_bytes, effect.verdict, effect.peak_at) == (
            after.needed.nbytes, after.verdict, after.peak_at,
        )


def test_what_would_help_is_told_from_what_saves_most_to_what_takes_more() -> None:
    saved = [effect.saved_bytes for effect in advice_on_llama()]
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > 0 > saved[-1] or len(set(saved)) > 2


def test_where_the_peak_is_elsewhere_a_change_saves_nothing_and_says_so(
    capsys: pytest.CaptureFixture[str]
) -> None:
    """The peak of Llama-3 8B is in the logits: resharding the root after forward moves nothing."""
    (effect,) = (
        effect for effect in advice_on_llama() if effect.change == "reshard_after_forward = true"
    )
    assert effect.saved_bytes == 0
    assert effect.peak_at == "backward root"
    assert main(["show", LLAMA, "--memory"]) == 0
    assert "no effect on the peak" in capsys.readouterr().out


def test_a_fused_optimizer_saves_in_its_own_part_where_the_peak_is_not() -> None:
    case = scenario('name = "fsdp2"', cluster="cpu-gloo", ranks=8, micro=8)
    effects = advice(way_of((), planned(case)))
    (fused,) = (effect for effect in effects if effect.change == "fused optimizer")
    assert (fused.saved_bytes, list(fused.saved_by_part)) == (0, ["optimizer"])
    assert re.fullmatch(
        r"no effect on the peak, it saves [\d.]+ MiB in optimizer", finding(fused)
    )


def test_checkpointing_saves_activations_and_costs_a_forward() -> None:
    (effect,) = (
        effect for effect in advice_on_llama()
        if effect.change.startswith("activation checkpointing")
    )
    assert effect.saved_bytes > 30 * 2**30  # 38 GiB of activations, and what is cached besides
    assert effect.added_ns > 0


OFFLOAD = "offload = true: states and the optimizer's step go to the host"


@pytest.mark.parametrize(("strategy", "expected"), [
    ('name = "ddp"', {"strategy zero1", "gradient_as_bucket_view = true"}),
    ('name = "zero2"', {"strategy zero3"}),
    ('name = "zero_redundancy"', {"strategy zero2", "gradient_as_bucket_view = true"}),
    ('name = "zero3"', set[str]()),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 4',
     {"strategy fsdp2: shard over all ranks", "reshard_after_forward = true", OFFLOAD}),
])
def test_only_changes_that_make_sense_are_tried(strategy: str, expected: set[str]) -> None:
    common = {"activation checkpointing of every block", "half the micro-batch, twice the "
                                                         "accumulation"}
    on_device = {"fused optimizer", "allocator.expandable_segments = true"}
    assert {name for name, _ in changes(scenario(strategy))} == expected | common | on_device
    odd = scenario(strategy, micro=1, more='activation_checkpointing = { mode = "full" }')
    inputs = {'offload.activations = "checkpoint_inputs"'}
    assert {name for name, _ in changes(odd)} == expected | on_device | inputs


# -- the least stage that fits


def test_a_small_model_needs_no_sharding_and_a_large_one_all_of_it() -> None:
    text = (SCENARIOS / "published/llama-3-8b-8-h100.toml").read_text()
    five_large_layers = text.replace('preset = "llama-3-8b"', 'preset = "llama-3-405b", '
                                                              'num_layers = 5')
    small, large = fit(scenario()), fit(parse(five_large_layers.encode(), where="large.toml"))
    assert small.recommended is not None
    assert small.recommended.memory.verdict == "FITS"
    assert {each.memory.verdict for each in small.candidates} == {"FITS"}
    assert large.recommended is not None
    assert large.recommended.scenario.checkpointing.mode == "full"
    assert large.recommended.scenario.strategy in ("fsdp2", "zero3")


def candidate(name: str, verdict: str, time: int) -> Candidate:
    case = scenario()
    nbytes = {"FITS": 10, "TIGHT": 100, "OOM": 200}[verdict]
    made = replace(
        of(case), needed=BytesBand(nbytes=nbytes, low=nbytes - 1, high=nbytes + 1),
        capacity=BytesBand(nbytes=100, low=100, high=100),
    )
    return Candidate(
        name=name, scenario=case, memory=made, step_time_ns=time, step_time_band_ns=(time, time)
    )


def test_the_fastest_that_fits_is_taken_unless_one_that_shards_less_is_as_fast() -> None:
    a, b, c = candidate("a", "FITS", 1019), candidate("b", "FITS", 1000), candidate("c", "OOM", 1)
    assert recommend((a, b, c))[0] is a
    assert recommend((replace(a, step_time_ns=1021), b, c))[0] is b
    assert recommend((a, b, c))[1] == (
        "one of 2 (of 3) that fit, 1.019 us a step; b is less than 2 % faster (1.000 us) and "
        "shards or recomputes more; of those that do not fit c needs least, 200 B"
    )


def test_what_is_tight_is_taken_only_when_nothing_fits_and_what_does_not_fit_never() -> None:
    tight, out = candidate("tight", "TIGHT", 5), candidate("out", "OOM", 1)
    assert recommend((out, tight))[0] is tight
    fits = candidate("fits", "FITS", 9)
    assert recommend((out, tight, fits))[0] is fits
    assert recommend((out, tight, fits))[1] == (
        "the fastest of 1 (of 3) that fit, 9 ns a step; of those that do not fit out needs least, "
        "200 B"
    )  # what is tight is not called too large
    nothing, reason = recommend((out,))
    assert nothing is None
    assert reason.startswith("nothing fits: even out needs 200 B of 100 B")


def test_fit_prints_every_candidate_and_its_exit_code_says_whether_something_fits(
    capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(SCENARIOS / "published/llama-3-8b-8-h100.toml"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["recommended"] in [each["name"] for each in printed["candidates"]]
    assert {"ddp", "zero1", "zero2", "fsdp2", "zero3"} <= {
        each["strategy"] for each in printed["candidates"]
    }
    assert {each["activation_checkpointing"] for each in printed["candidates"]} == {"none", "full"}


def test_show_memory_as_json_holds_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", LLAMA, "--memory", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    verdict = of(load(LLAMA))
    assert printed["verdict"] == verdict.verdict
    assert printed["peak"] == {
        "phase": verdict.phase, "op": verdict.peak_at, "allocated_bytes": verdict.allocated_bytes
    }
    assert printed["waterfall"][-1]["nbytes"] == verdict.needed.nbytes
    assert printed["needed_bytes"]["nbytes"] == verdict.needed.nbytes
    assert {effect["change"] for effect in printed["what_would_help"]} == {
        name for name, _ in changes(load(LLAMA))
    }


def test_show_writes_a_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "snapshot.pickle"
    file.parent.mkdir()
    assert main(["show", str(SCENARIOS / "parity/fsdp2-gpt-4.toml"), "--snapshot", str(file)]) == 0
    assert file.read_bytes()[:2] == b"\x80\x04"


def test_the_phases_that_are_steps_are_those_of_a_program() -> None:
    assert answers.STEPS == ("first", "steady")


SCENARIO_OF_FSDP2 = """
model = { preset = "llama-3-8b", num_layers = 4 }
batch = { micro_batch = 1, sequence_length = 4096 }
cluster = { preset = "dgx-h100" }
strategy = { name = "fsdp2" }
precision = { parameters = "bf16", reduce = "fp32" }
"""


def test_a_ridge_ends_with_its_part_to_which_what_comes_before_its_compute_counts() -> None:
    """Copies and reductions behind the last backward are not the optimizer's, whose part has a peak
    of its own."""
    text = SCENARIO_OF_FSDP2
    program = plan.plan(parse(text.encode(), where="ridge.toml"), device="cuda").of_rank(0)
    record = replay(program)["steady"]
    (optimizer,) = (part for part in record.parts if part.name == "optimizer")
    peaks = ridges(program, "steady")
    assert [nbytes for label, nbytes in peaks if label == "optimizer root"] == [
        optimizer.peak_bytes
    ]
    backward = max(part.peak_bytes for part in record.parts if part.name == "backward")
    assert max(nbytes for label, nbytes in peaks if label.startswith("backward")) == backward
