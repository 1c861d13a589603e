"""The longest path through a Program's graph, which is the length of its step, and the waits that
change nothing."""

from __future__ import annotations

from collections.abc import Callable

import networkx

from zsim.ir.ops import Op
from zsim.ir.order.graph import Node
from zsim.ir.order.happens_before import happened
from zsim.ir.program import PhaseName, RankProgram


def longest_path(
    digraph: networkx.DiGraph, node_ns: Callable[[Node, Op], int]
) -> tuple[int, tuple[Node, ...]]:
    """Nanoseconds of the longest path, and its nodes in order; each node lasts `node_ns(node,
    op)`."""
    ends: dict[Node, int] = {}
    reason: dict[Node, Node | None] = {}
    for node in networkx.topological_sort(digraph):
        last = max(digraph.predecessors(node), key=ends.__getitem__, default=None)
        reason[node] = last
        ends[node] = (ends[last] if last is not None else 0) + node_ns(
            node, digraph.nodes[node]["op"]
        )
    path = [max(ends, key=ends.__getitem__)] if ends else []
    while path and (before := reason[path[-1]]) is not None:
        path.append(before)
    return max(ends.values(), default=0), tuple(reversed(path))


def unused_waits(rank: RankProgram, *, phase: PhaseName = "steady") -> tuple[tuple[int, int], ...]:
    """Pairs (op, wait) that change nothing: streams and the op's other waits imply them."""
    ops = rank.phase(phase)
    order = happened(ops)
    unused = []
    for op in ops:
        tail = (
            max((o.index for o in ops[: op.index] if o.stream == op.stream), default=-1)
            if op.stream != "host"
            else -1
        )
        for wait in op.waits:
            others = [other for other in (*op.waits, tail) if other not in (wait, -1)]
            if wait == tail or any(order.before(wait, other) for other in others):
                unused.append((op.index, wait))
    return tuple(unused)
