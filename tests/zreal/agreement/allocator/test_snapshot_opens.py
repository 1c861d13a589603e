"""torch's own tools open the snapshot that zsim writes.

torch.cuda._memory_viz is a private name of torch: only these tests use it, because it is what the
file is for. It is pure Python and needs no GPU. The page that it makes draws in a browser; the
opcodes that the browser reads are tested with zsim.
"""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from zsim.ir.program import RankProgram
from zsim.memory.allocator.reserved import replay
from zsim.memory.allocator.snapshot import snapshot, write_snapshot
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

SCENARIO = """
description = "two blocks on two ranks"
model = { family = "mlp", sizes = { dims = [700, 800, 900], hidden = 600, num_classes = 3 } }
batch = { micro_batch = 2 }
cluster = { preset = "dgx-h100", ranks = 2 }
strategy = { name = "fsdp2", dp_shard = 2 }
"""


@pytest.fixture(params=[False, True], ids=["cudaMalloc", "expandable_segments"])
def opened(request, tmp_path):
    """(the Program, whether its segments expand, its snapshot as read from the file)."""
    program = plan(parse(SCENARIO.encode(), where="snapshot.toml"), device="cuda").ranks[0]
    path: Path = tmp_path / "snapshot.pickle"
    write_snapshot(snapshot(program, expandable_segments=request.param), path)
    return program, request.param, pickle.loads(path.read_bytes())


def records(opened):
    program, expandable, _ = opened
    assert isinstance(program, RankProgram)
    return replay(program, expandable_segments=expandable)


def test_stats_count_the_reserved_bytes_of_the_replay_and_find_them_consistent(opened):
    text = _memory_viz.segsum(opened[2])
    end = records(opened)["steady"]
    assert f"segments: {end.num_segments}\n" in text
    assert f"total_reserved: {_memory_viz.Bytes(end.end_reserved_bytes)!r}\n" in text


def test_the_trace_is_told_event_by_event(opened):
    text = _memory_viz.trace(opened[2])
    entries = opened[2]["device_traces"][0]
    assert text.startswith(f"Device 0 ----------------\n{len(entries)} entries\n")
    assert text.count("# free completed for") == sum(
        event["action"] == "free_completed" for event in entries
    )


def test_the_flame_graph_of_memory_has_each_byte_of_each_stream_under_its_kind_op_and_buffer(
    opened
):
    text = _memory_viz.memory(opened[2], format_flamegraph=str)
    lines = [line.rpartition(" ") for line in text.splitlines()]
    assert (
        sum(int(nbytes) for _, _, nbytes in lines) == records(opened)["steady"].end_reserved_bytes
    )
    assert any(
        path.startswith("stream_0;active_allocated;kind:0:parameters;construction:")
        and "buffer:0:" in path
        for path, _, _ in lines
    )
    assert _memory_viz.segments(opened[2], format_flamegraph=str).count("\n") == len(lines)


def test_two_snapshots_are_compared(opened, capsys):
    text = _memory_viz.compare([], opened[2]["segments"], format_flamegraph=str)
    assert capsys.readouterr().out.startswith("only_before = []\nonly_after = [")
    assert all(line.startswith("only_after;stream_") for line in text.splitlines())


@pytest.mark.parametrize(("plot", "view"), [
    (_memory_viz.trace_plot, "Active Memory Timeline"),
    (lambda data: _memory_viz.trace_plot(data, plot_segments=True),
     "Active Cached Memory Timeline"),
    (_memory_viz.segment_plot, "Allocator State History"),
])
def test_the_plots_carry_the_whole_snapshot(opened, plot, view):
    page = plot(opened[2])
    assert f"add_local_files(local_files, '{view}')" in page
    (start,) = (line for line in page.splitlines() if line.startswith("const local_files = "))
    (file,) = json.loads(start.removeprefix("const local_files = "))
    assert pickle.loads(base64.b64decode(file["base64"])) == opened[2]


def test_without_what_was_freed_only_what_lives_at_the_end_is_left(opened):
    kept = _memory_viz.filter_alloc_free_pairs(opened[2])["device_traces"][0]
    live = sum(
        block["requested_size"] for segment in opened[2]["segments"] for block in segment["blocks"]
    )
    assert {event["action"] for event in kept} <= {
        "snapshot", "alloc", "segment_alloc", "segment_map"
    }
    assert sum(event["size"] for event in kept if event["action"] == "alloc") == live
