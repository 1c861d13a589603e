"""Traces against the Trace Event Format: what a viewer needs to find of every event, and what the
arrows and counters say."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.support.folders import SCENARIOS
from zsim.io.files import PlaceError
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import RunRecord
from zsim.runs import saved
from zsim.runs.backend import RunOptions
from zsim.runs.pictures import chrome_trace
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario

NAMES = [
    "published/hsdp-llama-3-8b-4x8-h100", "parity/zero3-gpt-4-lookahead-2",
    "parity/zero-redundancy-gpt-4", "parity/fsdp2-uneven-4",
]

REQUIRED = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "name", "cat", "pid", "tid", "ts", "s", "args"},
    "C": {"ph", "name", "pid", "ts", "args"}, "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""The keys of each kind of event, as the format's description has them."""


def simulated(name: str, *, all_ranks: bool = True) -> RunRecord:
    return SimBackend().run(
        scenario.load(SCENARIOS / f"{name}.toml"), options=RunOptions(all_ranks=all_ranks)
    )


@pytest.fixture(scope="module", params=NAMES)
def run(request: pytest.FixtureRequest) -> RunRecord:
    """A Run of all its ranks."""
    return simulated(request.param)


def by_kind(run: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """The events as a viewer reads them: through JSON."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(json.dumps(chrome_trace.trace(run)))["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def ns(microseconds: float) -> int:
    """The nanoseconds of a time in the trace, which must lose none."""
    exact = round(Fraction(str(microseconds)) * 1000)
    assert exact / 1000 == microseconds
    return exact


def test_every_event_has_what_the_format_asks_for(run):
    for kind, events in by_kind(run).items():
        for event in events:
            assert (
                set(event) - ({"tid"} if event["name"].startswith("thread_") else set())
                == REQUIRED[kind]
            )
            assert all(isinstance(event[key], int) for key in ("pid", "tid", "id") if key in event)
            assert all(event[key] >= 0 for key in ("ts", "dur") if key in event)


def test_every_process_and_thread_with_events_has_a_name(run):
    events = by_kind(run)
    named = {
        (e["pid"], e.get("tid")) for e in events["M"]
        if e["name"] in ("process_name", "thread_name")
    }
    used = {(e["pid"], e["tid"]) for e in [*events["X"], *events["i"]]}
    assert named == used | {(rank.rank, None) for rank in run.ranks}


def test_slices_and_instants_are_the_spans_to_the_nanosecond(run):
    events = by_kind(run)
    seen = sorted(
        (e["pid"], e["name"], ns(e["ts"]), ns(e.get("dur", 0)))
        for e in [*events["X"], *events["i"]] if e["cat"] != "part"
    )
    assert seen == sorted(
        (r.rank, s.name, s.start_ns, s.end_ns - s.start_ns) for r in run.ranks for s in r.spans
    )
    assert {e["cat"] for e in events["i"]} <= {"alloc", "free"}


def test_parts_of_the_step_hold_the_computations_of_each_rank(run):
    slices = by_kind(run)["X"]
    for rank in run.ranks:
        parts = [
            (e["name"], ns(e["ts"]), ns(e["ts"]) + ns(e["dur"])) for e in slices
            if e["cat"] == "part" and e["pid"] == rank.rank
        ]
        assert [name for name, *_ in parts] == ["forward", "backward", "optimizer"]
        for span in rank.spans:
            part = chrome_trace.PART_OF.get(span.kind)
            if part and span.end_ns > span.start_ns:
                assert any(
                    name == part and start <= span.start_ns and span.end_ns <= end
                    for name, start, end in parts
                )


def test_slices_of_a_thread_do_not_overlap(run):
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in by_kind(run)["X"]:
        threads[event["pid"], event["tid"]].append(
            (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]))
        )
    for slices in threads.values():
        slices.sort()
        assert all(before[1] <= after[0] for before, after in zip(slices, slices[1:], strict=False))


def test_without_notes_ranks_that_begin_together_have_no_arrows(run):
    assert not {"s", "f"} & set(by_kind(run))


def test_counters_are_the_ledger_at_the_moments_of_issue(run):
    counters = by_kind(run)["C"]
    for rank in run.ranks:
        memory = rank.phases["steady"].memory
        counted = [(ns(e["ts"]), e["args"]["bytes"]) for e in counters if e["pid"] == rank.rank]
        issued = [span.issued_ns for span in rank.spans]
        assert counted == [
            (0, memory.start_bytes),
            *zip(issued, (after for _, after in memory.timeline), strict=True),
        ]
        assert issued == sorted(issued)
        assert all(span.issued_ns <= span.start_ns for span in rank.spans)


def test_a_folded_rank_says_for_how_many_it_stands():
    run = simulated("published/llama-3-8b-8-h100", all_ranks=False)
    names = [e["args"]["name"] for e in by_kind(run)["M"] if e["name"] == "process_name"]
    assert names == ["rank 0 and 7 like it"]


def test_a_run_without_spans_has_names_alone():
    run = simulated("parity/fsdp2-mlp-4")
    silent = replace(run, ranks=tuple(replace(rank, spans=()) for rank in run.ranks))
    assert set(by_kind(silent)) == {"M"}


def test_a_written_trace_reads_back_compressed_or_not(tmp_path):
    run = simulated("parity/fsdp2-mlp-4")
    chrome_trace.write(run, tmp_path / "t.json")
    chrome_trace.write(run, tmp_path / "deep" / "t.json.gz")
    plain = json.loads((tmp_path / "t.json").read_text())
    assert (
        plain
        == json.loads(gzip.decompress((tmp_path / "deep" / "t.json.gz").read_bytes()))
        == chrome_trace.trace(run)
    )
    assert plain["otherData"]["scenario"] == "fsdp2-mlp-4"


def test_a_trace_that_cannot_be_written_says_where(tmp_path):
    with pytest.raises(PlaceError, match=r"expected a file that can be written"):
        chrome_trace.write(simulated("parity/fsdp2-mlp-4"), tmp_path)


def test_arrows_lead_from_the_rank_that_begins_a_collective_last_to_those_that_wait_for_it():
    run = simulated("parity/fsdp2-mlp-4")
    late = replace(
        run.ranks[2],
        spans=tuple(
            replace(s, start_ns=s.start_ns + 1, end_ns=s.end_ns + 1) for s in run.ranks[2].spans
        ),
    )
    events = by_kind(replace(run, ranks=(*run.ranks[:2], late, run.ranks[3])))
    assert {event["pid"] for event in events["s"]} == {2}
    assert {event["pid"] for event in events["f"]} == {0, 1, 3}
    collectives = [span for span in late.spans if span.kind in COLLECTIVES]
    assert len(events["s"]) == len(events["f"]) == 3 * len(collectives)
    assert [e["id"] for e in events["s"]] == [e["id"] for e in events["f"]]
    assert {ns(e["ts"]) for e in events["f"]} == {span.start_ns for span in collectives}


def rings_as_steps() -> RunRecord:
    case = scenario.load(SCENARIOS / "rings" / "hsdp-llama-3.2-1b-2x16-roce.toml")
    return SimBackend().run(case, options=RunOptions(hops=True))


def test_hops_of_rings_are_threads_of_the_rank_that_sends():
    """A thread for each ring that a rank is on, named by its next rank, with a span for each chunk.
    """
    run = rings_as_steps()
    events = by_kind(run)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events["M"]
        if event["name"] == "thread_name"
    }
    hops = [event for event in events["X"] if event["cat"] == "hop"]
    assert len(hops) == len(run.hops) == 7040
    assert {names[event["pid"], event["tid"]] for event in hops if event["pid"] == 7} == {
        "dp_shard ring, to rank 8 by rail", "dp_replicate ring, to rank 23 by rail",
    }
    assert {names[event["pid"], event["tid"]] for event in hops if event["pid"] == 31} == {
        "dp_shard ring, to rank 16 by rail", "dp_replicate ring, to rank 15 by rail",
    }
    first = min((event for event in hops if event["pid"] == 3), key=lambda event: event["ts"])
    assert first["name"] == "all_gather root step 0"
    assert first["args"] == {"to": 4, "lost_ns": 0}
    assert any(event["args"]["lost_ns"] for event in hops)


def test_hops_of_one_ring_follow_one_another_and_lie_in_their_collective():
    run = rings_as_steps()
    spans = {
        rank.rank: [span for span in rank.spans if span.kind in COLLECTIVES] for rank in run.ranks
    }
    rows = defaultdict(list)
    for hop in run.hops:
        rows[hop.source, hop.group].append(hop)
        assert any(
            span.name == hop.name and span.start_ns <= hop.start_ns <= hop.end_ns <= span.end_ns
            for span in spans[hop.source]
        )
    for hops in rows.values():
        assert all(a.end_ns <= b.start_ns for a, b in zip(hops, hops[1:], strict=False))


def test_only_hops_of_shown_ranks_are_drawn():
    case = scenario.load(SCENARIOS / "rings" / "fsdp2-gpt-2-124m-8-pcie.toml")
    run = SimBackend().run(case, options=RunOptions(ranks=(2, 5), hops=True))
    assert {event["pid"] for event in by_kind(run)["X"]} == {2, 5}


def test_a_run_without_a_trace_keeps_no_hops():
    case = scenario.load(SCENARIOS / "rings" / "fsdp2-gpt-2-124m-8-pcie.toml")
    assert SimBackend().run(case, options=RunOptions()).hops == ()


def test_hops_are_saved_with_their_run(tmp_path):
    case = scenario.load(SCENARIOS / "rings" / "fsdp2-gpt-2-124m-8-pcie.toml")
    run = SimBackend().run(case, options=RunOptions(hops=True))
    saved.save(run, tmp_path / "run.json")
    assert saved.load(tmp_path / "run.json") == run
