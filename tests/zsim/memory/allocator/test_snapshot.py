"""The snapshot file: its format, its bytes against the ledger, and what the visualiser in the
browser needs of it."""

from __future__ import annotations

import pickle
import pickletools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases.sampling import WHOLE
from zsim.errors import ProgramError
from zsim.ir import ledger_replay as memory
from zsim.ir.ops import MEMORY_KINDS, Alloc, Free, Kernel, Op
from zsim.ir.program import PHASES, RankProgram
from zsim.memory.allocator.reserved import replay
from zsim.memory.allocator.snapshot import snapshot, write_snapshot
from zsim.scenario.plan import plan
from zsim.testing.strategies import scenarios

MIB = 2**20
BASE = 0x5000_0000_0000
OPCODES_OF_THE_VISUALISER = {
    *(
        "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
        "BININT2", "LONG1",
    ),
    *(
        "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "SETITEM", "SETITEMS",
        "EMPTY_LIST", "APPEND",
    ),
    *(
        "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MEMOIZE", "BINGET",
        "LONG_BINGET",
    ),
}
"""Opcodes of pickles of protocol 4 that `unpickle` in torch/utils/viz/MemoryViz.js reads."""


def rank() -> RankProgram:
    """A parameter, then an activation of another stream that is freed."""
    return RankProgram(
        construction=(
            Op(
                index=0, kind="alloc", unit="root", stream="host",
                memory=(Alloc("p", "parameters", 100),),
            ),
        ),
        first=(),
        steady=(
            Op(
                index=0, kind="forward", unit="root", stream="all_gather",
                memory=(Alloc("x", "activations", 3 * MIB), Free("x")),
            ),
        ),
    )


def entry(
    action: str, addr: int, size: int, stream: int, time_us: int, frames: list[dict[str, object]],
    category: str,
):
    return {
        "action": action, "addr": addr, "size": size, "stream": stream, "time_us": time_us,
        "compile_context": "N/A", "user_metadata": "", "frames": frames, "category": category,
    }


def test_a_snapshot_has_every_segment_block_and_event_with_buffer_op_and_kind_as_its_stack():
    made = {"name": "alloc root", "filename": "construction", "line": 0}
    ran = {"name": "forward root", "filename": "steady", "line": 0}
    p = [
        {"name": "p", "filename": "buffer", "line": 0}, made,
        {"name": "parameters", "filename": "kind", "line": 0},
    ]
    x = [
        {"name": "x", "filename": "buffer", "line": 0}, ran,
        {"name": "activations", "filename": "kind", "line": 0},
    ]
    upper = BASE + 2 * MIB
    taken = snapshot(rank())
    assert taken["device_traces"] == [
        [
            entry("snapshot", 0, 0, 0, 0, [], "unknown"),
            entry("segment_alloc", BASE, 2 * MIB, 0, 1, [made], "unknown"),
            entry("alloc", BASE, 100, 0, 2, p, "parameters"),
            entry("segment_alloc", upper, 20 * MIB, 2, 3, [ran], "unknown"),
            entry("alloc", upper, 3 * MIB, 2, 4, x, "activations"),
            entry("free_requested", upper, 3 * MIB, 2, 5, x, "activations"),
            entry("free_completed", upper, 3 * MIB, 2, 6, x, "activations"),
        ]
    ]
    assert taken["segments"][0] == {
        "device": 0, "address": BASE, "total_size": 2 * MIB, "allocated_size": 512,
        "active_size": 512, "requested_size": 100, "stream": 0, "segment_type": "small",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
        "blocks": [
            {
                "address": BASE, "size": 512, "requested_size": 100, "state": "active_allocated",
                "frames": p,
            },
            {
                "address": BASE + 512, "size": 2 * MIB - 512, "requested_size": 0,
                "state": "inactive", "frames": [],
            },
        ],
    }
    assert [
        (s["address"], s["total_size"], s["segment_type"], s["stream"])
        for s in taken["segments"][1:]
    ] == [(upper, 20 * MIB, "large", 2)]


def test_pages_of_expandable_segments_are_mapped_in_the_trace():
    actions = [
        event["action"] for event in snapshot(rank(), expandable_segments=True)["device_traces"][0]
    ]
    assert actions[1:] == [
        "segment_map", "alloc", "segment_map", "alloc", "free_requested", "free_completed"
    ]


def test_the_workspaces_of_cublas_are_in_the_trace():
    op = Op(
        index=0, kind="forward", unit="root", stream="compute",
        kernels=(Kernel("linear", 1, 1, "float32"),),
    )
    (trace,) = snapshot(
        RankProgram(construction=(), first=(op,), steady=()), workspace_bytes=32 * MIB
    )["device_traces"]
    assert [
        (event["action"], event["size"], event["frames"][0]["name"]) for event in trace[1:]
    ] == [
        ("segment_alloc", 32 * MIB, "forward root"),
        ("alloc", 32 * MIB, "cuBLAS workspace, main thread"),
    ]


def test_the_file_is_a_pickle_that_the_visualiser_in_the_browser_can_read(tmp_path):
    path = tmp_path / "steady.pickle"
    write_snapshot(snapshot(rank()), path)
    content = path.read_bytes()
    assert pickle.loads(content) == snapshot(rank())
    opcodes = list(pickletools.genops(content))
    assert opcodes[0][1] == 4
    assert {opcode.name for opcode, _, _ in opcodes} <= OPCODES_OF_THE_VISUALISER


def test_a_program_that_frees_what_does_not_live_is_refused():
    op = Op(index=0, kind="forward", unit="root", stream="compute", memory=(Free("x"),))
    with pytest.raises(ProgramError, match="expected a live buffer, found x: it is freed"):
        snapshot(RankProgram(construction=(), first=(), steady=(op,)))


@pytest.mark.parametrize(
    ("expandable", "action"), [(False, "segment_free"), (True, "segment_unmap")]
)
def test_emptying_the_cache_after_construction_is_in_the_trace(expandable, action):
    whole = (Alloc("whole", "parameters", 40 * MIB), Free("whole"), Alloc("p", "parameters", 100))
    built = Op(index=0, kind="alloc", unit="root", stream="host", memory=whole)
    made = snapshot(
        RankProgram(construction=(built,), first=(), steady=()), expandable_segments=expandable,
        empty_cache=True,
    )
    frame = {"name": "torch.cuda.empty_cache", "filename": "construction", "line": 0}
    assert made["device_traces"][0][-1] == entry(action, BASE, 40 * MIB, 0, 7, [frame], "unknown")
    assert [segment["total_size"] for segment in made["segments"]] == [2 * MIB]


@WHOLE
@given(scenarios(), st.booleans(), st.booleans())
def test_the_trace_adds_up_to_the_ledger_and_played_backwards_from_the_segments_ends_at_an_empty_device(  # noqa: E501
    case, expandable, emptied
):
    program = plan(case, device="cuda").ranks[0]
    made = snapshot(program, expandable_segments=expandable, empty_cache=emptied)
    (trace,) = made["device_traces"]
    assert {event["category"] for event in trace} <= {*MEMORY_KINDS, "unknown"}
    assert sum(segment["total_size"] for segment in made["segments"]) == (
        replay(
            program, expandable_segments=expandable, empty_cache="first" if emptied else None
        )["steady"].end_reserved_bytes
    )
    live = {
        block["address"]: block["requested_size"] for segment in made["segments"]
        for block in segment["blocks"] if block["state"] == "active_allocated"
    }
    total = reserved = peak = 0
    ranges: list[tuple[int, int]] = []
    for event in trace:
        if event["action"] in ("segment_alloc", "segment_map"):
            ranges.append((event["addr"], event["addr"] + event["size"]))
        elif event["action"] == "alloc":
            assert any(begin <= event["addr"] < end for begin, end in ranges)
        total += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        reserved += event["size"] if event["action"] in ("segment_alloc", "segment_map") else 0
        reserved -= event["size"] if event["action"] in ("segment_free", "segment_unmap") else 0
        peak = max(peak, total)
    ledger = memory.replay(program, timeline=False)
    assert (total, peak) == (
        ledger["steady"].end_bytes, max(ledger[phase].peak_bytes for phase in PHASES),
    )
    assert reserved == sum(segment["total_size"] for segment in made["segments"])
    for event in reversed(trace):
        if event["action"] == "alloc":
            assert live.pop(event["addr"]) == event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
    assert live == {}
