"""Collectives under way: one after another, while the host goes on, until an op waits for them."""

from __future__ import annotations

import threading

from zreal.executor.under_way import UnderWay
from zsim.ir.ops import Op

GATHER, REDUCTION = (
    Op(index=index, kind=kind, unit="blocks.0", stream=kind, group="dp_shard", nbytes=8)
    for index, kind in enumerate(("all_gather", "reduce_scatter"))
)


def op_that_waits(*waits: int, stream: str = "compute", kind: str = "forward") -> Op:
    """An op with such waits."""
    return Op(index=9, kind=kind, unit="blocks.0", stream=stream, waits=waits)


def test_the_host_goes_on_and_an_op_waits_for_what_it_names() -> None:
    under_way, permitted, ended = UnderWay(), threading.Event(), []
    under_way.add(GATHER, lambda: permitted.wait(5) and ended.append("gather"))
    under_way.wait(op_that_waits())
    assert (ended, bool(under_way)) == ([], True)
    permitted.set()
    under_way.wait(op_that_waits(GATHER.index))
    assert (ended, bool(under_way)) == (["gather"], False)


def test_a_communicator_is_one_queue() -> None:
    under_way, permitted, ended = UnderWay(), threading.Event(), []
    under_way.add(REDUCTION, lambda: permitted.wait(5) and ended.append("reduction"))
    under_way.add(GATHER, lambda: ended.append("gather"))
    permitted.set()
    under_way.wait(op_that_waits(GATHER.index))
    assert ended == ["reduction", "gather"]
    assert under_way  # nobody has waited for the reduction


def test_an_op_on_the_stream_of_a_collective_comes_after_it_and_another_collective_does_not() -> (
    None
):
    under_way, permitted, ended = UnderWay(), threading.Event(), []
    under_way.add(REDUCTION, lambda: permitted.wait(5) and ended.append("reduction"))
    under_way.wait(REDUCTION)
    assert ended == []
    permitted.set()
    under_way.wait(op_that_waits(stream="reduce_scatter", kind="copy"))
    assert ended == ["reduction"]
