"""A Program as a networkx graph, with an edge for each reason that one op comes after another.

Nodes are ("issue", rank, index) for the host and ("run", rank, index) for the op that it issued.
The members of a collective share one node ("meet", group, ranks, position). The attribute `why` of
an edge is "host", "queue", "issued", "wait", "stream" or "communicator". The graph knows no time. A
caller gives each node its nanoseconds, and the longest path is then the length of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import networkx

from zsim.errors import ProgramError
from zsim.ir.ledger import label
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.order.happens_before import happened
from zsim.ir.order.launch_queue import NONE, awaited
from zsim.ir.program import PhaseName, Program, RankProgram

Node = tuple[Any, ...]
Why = Literal["host", "queue", "issued", "wait", "stream", "communicator"]


def graph(
    program: Program, *, phase: PhaseName = "steady", ranks: Iterable[int] | None = None,
    launch_queue: int = 0,
) -> networkx.DiGraph:
    """The graph of `phase` over all ranks, or over `ranks`; each node has its `op`. ProgramError
    where it has a cycle.

    The host waits while `launch_queue` kernels are pending; 0 is a queue without limit.
    """
    digraph = networkx.DiGraph()
    for rank in range(program.mesh.world_size) if ranks is None else ranks:
        _add_rank(digraph, program, rank, phase, launch_queue)
    if not networkx.is_directed_acyclic_graph(digraph):
        ring = [node for node, _ in networkx.find_cycle(digraph)]
        ops = ", ".join(dict.fromkeys(label(digraph.nodes[node]["op"]) for node in ring))
        raise ProgramError(
            where=phase, expected="an order in which every op can run", found=f"a deadlock: {ops}"
        )
    return digraph


def _add_rank(
    digraph: networkx.DiGraph, program: Program, rank: int, phase: PhaseName, launch_queue: int
) -> None:
    host: Node | None = None
    runs: list[Node] = []
    tails: dict[str, Node] = {}
    positions: dict[str, int] = {}
    ops = program.of_rank(rank).phase(phase)
    for op, room in zip(ops, awaited(ops, launch_queue=launch_queue), strict=True):
        issue, run = ("issue", rank, op.index), _run_node(program, rank, op, positions)
        digraph.add_node(issue, op=op)
        digraph.add_node(run, op=op)
        edges: list[tuple[Node | None, Node, Why]] = [(host, issue, "host"), (issue, run, "issued")]
        edges += [(runs[room], issue, "queue")] if room != NONE else []
        edges += [(runs[wait], run, "wait") for wait in op.waits]
        if op.stream != "host":
            edges.append((tails.get(op.stream), run, "stream"))
            tails[op.stream] = run
        if run[0] == "meet" and run[-1]:
            edges.append(((*run[:-1], run[-1] - 1), run, "communicator"))
        for source, target, why in edges:
            if source is not None and not digraph.has_edge(source, target):
                digraph.add_edge(source, target, why=why)
        runs.append(run)
        host = run if op.stream == "host" and op.waits else issue


def _run_node(program: Program, rank: int, op: Op, positions: dict[str, int]) -> Node:
    if op.kind not in COLLECTIVES:
        return ("run", rank, op.index)
    position = positions[op.group] = positions.get(op.group, -1) + 1
    return ("meet", op.group, program.mesh.group(op.group, rank), position)


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
