"""Tables of a report against the Run they are of: bytes, exposed time, traffic, the front."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from tests.support.folders import PARITY
from zsim.errors import ZsimError
from zsim.report import data_of, of_record, of_scenario
from zsim.report.candidate_tables import dominates
from zsim.report.memory_tables import memory_table
from zsim.report.memory_walk import MemoryWalk, thinned, walk
from zsim.report.sides import ReportSide, facts
from zsim.report.timeline_tables import (
    COUNT,
    CRITICAL,
    END,
    EXPOSED,
    START,
    merged,
    timelines,
)
from zsim.report.topology_tables import topology
from zsim.runs.figures import metrics

GPT = {
    "model": {"preset": "gpt-tiny"}, "batch": {"micro_batch": 1, "sequence_length": 32},
    "precision": {"parameters": "bf16"},
}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp1", "deepspeed3")


def gpt(strategy: str, *, nodes: int = 1, mesh: dict[str, int] | None = None) -> zsim.Scenario:
    return zsim.Scenario(
        cluster={"preset": "dgx-h100", "nodes": nodes}, strategy={"name": strategy, **(mesh or {})},
        **GPT,
    )


@pytest.fixture(scope="module", params=STRATEGIES)
def side(request: pytest.FixtureRequest) -> ReportSide:
    return of_scenario(gpt(request.param))


@pytest.fixture(scope="module")
def two_nodes() -> ReportSide:
    return of_scenario(gpt("hsdp", nodes=2, mesh={"dp_replicate": 2, "dp_shard": 8}))


def test_the_walk_through_memory_has_the_peak_and_the_end_of_the_run(side):
    assert side.step is not None
    for rank in side.record.ranks:
        memory = rank.phases["steady"].memory
        states = list(walk(side.step.program.of_rank(rank.rank)).states())
        totals = [sum(state.values()) for state in states]
        assert (totals[0], max(totals), totals[-1]) == (
            memory.start_bytes, memory.peak_bytes, memory.end_bytes
        )
        kinds = dict.fromkeys(memory.by_kind, 0)
        for (kind, _), nbytes in states[totals.index(max(totals))].items():
            kinds[kind] += nbytes
        assert kinds == dict(memory.by_kind)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp1", "fsdp2"])
def test_states_of_the_optimizer_belong_to_the_units_of_their_parameters(strategy):
    step = of_scenario(gpt(strategy)).step
    assert step is not None
    for program in step.program.ranks:
        held = walk(program).start
        whole = {unit: n for (kind, unit), n in held.items() if kind == "parameters"}
        states = {unit: n for (kind, unit), n in held.items() if kind == "optimizer_states"}
        assert states.keys() == whole.keys()
        ratios = [states[unit] / whole[unit] for unit in whole]
        assert max(ratios) < 1.3 * min(ratios)  # step counters, padding


def totals_of(walked: MemoryWalk) -> list[int]:
    return [sum(state.values()) for state in walked.states()]


@pytest.mark.parametrize("most", [4, 40, 200])
def test_a_thinned_walk_keeps_the_peak_and_the_end(two_nodes, most):
    whole = walk(two_nodes.step.program.of_rank(0))
    thin = thinned(whole, most)
    assert len(thin.points) <= most
    assert max(totals_of(thin)) == max(totals_of(whole))
    assert list(thin.states())[-1] == list(whole.states())[-1]


def test_exposed_intervals_and_spans_are_those_of_the_run(side):
    table = timelines([side])
    for rank, drawn in zip(side.record.ranks, table["ranks"], strict=True):
        assert sum(end - start for start, end in drawn["exposed"]) == metrics.exposed_ns(rank)
        rows = [row for track in drawn["tracks"] for row in track["spans"]]
        assert sum(row[EXPOSED] for row in rows) == metrics.exposed_ns(rank)
        assert sorted(row[:2] for row in rows) == sorted(
            [span.start_ns, span.end_ns] for span in rank.spans if span.end_ns > span.start_ns
        )
        assert max(end for _, _, end in drawn["path"]) == max(row[END] for row in rows)


def test_a_saved_run_has_the_same_spans_and_exposed_time_without_a_path(side):
    (told,) = timelines([of_record(side.record)])["ranks"][:1]
    (known,) = timelines([side])["ranks"][:1]
    assert told["exposed"] == known["exposed"]
    assert told["path"] == []
    assert [len(t["spans"]) for t in told["tracks"]] == [len(t["spans"]) for t in known["tracks"]]


ROWS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 1), st.integers(0, 9)),
    max_size=12,
)


@given(ROWS, st.integers(0, 40))
def test_merged_rows_cover_the_same_time_and_lose_no_exposed_nanosecond(rows, width):
    at, track = 0, []
    for gap, length, critical, exposed in rows:
        track.append([at + gap, at + gap + length, 0, exposed, 0, critical, 1])
        at += gap + length
    fewer = merged(track, width)
    for column in (EXPOSED, COUNT):
        assert sum(row[column] for row in fewer) == sum(row[column] for row in track)
    assert [row[START] for row in fewer[:1]] == [row[START] for row in track[:1]]
    assert [row[END] for row in fewer[-1:]] == [row[END] for row in track[-1:]]
    kept = [row for row in track if row[END] - row[START] >= width]
    assert [row for row in fewer if row[END] - row[START] >= 3 * max(width, 1)] == [
        row for row in kept if row[END] - row[START] >= 3 * max(width, 1)
    ]
    assert {row[CRITICAL] for row in fewer} == {row[CRITICAL] for row in track}


def test_a_record_without_ops_has_the_total_at_each_part():
    record = of_scenario(gpt("fsdp2")).record
    rank = record.ranks[0]
    steady = rank.phases["steady"]
    memory = replace(steady.memory, timeline=(), by_kind={})
    phases = {**rank.phases, "steady": replace(steady, memory=memory)}
    table = memory_table(of_record(replace(record, ranks=(replace(rank, phases=phases),))))
    assert table is not None
    totals, now = [], table["start"][0]
    for _, _, _, change in table["points"]:
        now += change
        totals.append(now)
    assert max(totals) == memory.peak_bytes
    assert totals[-1] == memory.end_bytes
    assert "peak of backward, micro-batch 0" in table["labels"]


def test_ranks_that_did_not_reach_their_steady_step_are_left_out_or_the_run_is_refused():
    record = of_scenario(zsim.load(PARITY / "fsdp2-uneven-4.toml")).record
    first, *others = record.ranks
    failed = replace(first, phases={"construction": first.phases["construction"]})
    some = of_record(replace(record, ranks=(failed, *others), complete=False, failure="rank 0"))
    assert [rank.rank for rank in some.record.ranks] == [rank.rank for rank in others]
    assert ["warning", "rank 0"] in facts(some)
    with pytest.raises(ZsimError, match="found one that did not reach it: rank 0 died"):
        of_record(replace(record, ranks=(failed,), complete=False, failure="rank 0 died"))


def test_each_device_sends_over_its_fabric_what_the_run_says_that_it_sends(side):
    links = topology(side.step)["links"]
    sent = [link["bytes"] for link in links if link["kind"] == "fabric"]
    assert max(sent) == max(rank.bytes_sent for rank in side.record.ranks)


def test_replicas_meet_on_rails_and_shards_in_their_node(two_nodes):
    links = topology(two_nodes.step)["links"]
    for link in links:
        axis = "dp_replicate" if link["kind"] == "rail" else "dp_shard"
        if link["kind"] in ("rail", "fabric"):
            assert axis in link["by_group"]
    assert all("dp_shard" not in link["by_group"] for link in links if link["kind"] == "rail")


def test_every_candidate_has_a_reason_and_the_front_is_what_nothing_beats():
    scenario = gpt("fsdp2")
    table = data_of([of_scenario(scenario)])["sides"][0]["candidates"]
    rows = table["candidates"]
    fitted = zsim.fit(scenario)
    assert [row["name"] for row in rows] == [each.name for each in fitted.candidates]
    assert fitted.recommended is not None
    assert table["recommended"] == fitted.recommended.name
    costs = {row["name"]: (row["needed"][0], row["sent_bytes"], row["step_ns"]) for row in rows}
    able = [row["name"] for row in rows if row["verdict"] == "FITS"]
    for row in rows:
        beaten = any(dominates(costs[other], costs[row["name"]]) for other in able)
        assert row["front"] == (row["name"] in able and not beaten)
        assert row["why"]


def test_stages_hold_whole_or_sharded_states_and_gather_before_use():
    (own, *stages) = data_of([of_scenario(gpt("zero3"))])["sides"][0]["holders"]
    assert own["name"] == "zero3 (this scenario)"
    names = [stage["name"] for stage in stages]
    assert names == ["ddp", "zero1", "zero2", "fsdp2"]
    at_rest = {}
    for stage in (own, *stages):
        program = stage["programs"][0]
        sums = dict.fromkeys(("parameters", "optimizer_states"), 0)
        for (kind, _), nbytes in zip(program["owners"], program["start"], strict=True):
            sums[kind] = sums.get(kind, 0) + nbytes
        at_rest[stage["name"]] = sums
    whole = at_rest["ddp"]["optimizer_states"]
    assert at_rest["zero1"]["optimizer_states"] < whole
    assert at_rest["fsdp2"]["parameters"] < at_rest["ddp"]["parameters"]
    gathers = [label for label in own["programs"][0]["labels"] if "all_gather" in label]
    assert gathers


def test_a_simulated_and_a_measured_side_of_one_experiment_are_checked():
    simulated = of_scenario(zsim.load(PARITY / "fsdp2-mlp-4.toml"))
    measured = replace(simulated.record, interpreter="observer", backend="gloo")
    data = data_of([simulated, of_record(measured)])
    assert ["collective order", "ok"] in [row[:2] for row in data["checks"]]
    assert [side["name"] for side in data["sides"]] == [
        "fsdp2-mlp-4, simulated", "fsdp2-mlp-4, measured on gloo, saved"
    ]
