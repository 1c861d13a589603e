"""A Program as a networkx graph, with an edge for each reason that one op comes after another.

Nodes are ("issue", rank, index) for the host and ("run", rank, index) for the op that it issued.
The members of a collective share one node ("meet", group, ranks, position). An edge has its `rank`
and its two `ops` there. The graph knows no time. A caller gives each node its nanoseconds, and the
longest path is then the length of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import networkx

from zsim.ir.ops import COLLECTIVES, leaves_device
from zsim.ir.order.launch_queue import NONE, awaited
from zsim.ir.program import Program, ProgramSection

Node = tuple[Any, ...]


def graph(
    program: Program, *, section: ProgramSection = "steady", ranks: Iterable[int] | None = None,
    launch_queue: int = 0, one_group: bool = False,
) -> networkx.DiGraph:
    """The graph of `section` over all ranks, or over `ranks`; each node has its `op`.

    The host waits while `launch_queue` kernels are pending; 0 is a queue without limit. With
    `one_group` all groups of a name are one.
    """
    digraph = networkx.DiGraph()
    for rank in range(program.mesh.world_size) if ranks is None else ranks:
        _add_rank(digraph, program, rank, section, launch_queue, one_group)
    return digraph


def _add_rank(
    digraph: networkx.DiGraph, program: Program, rank: int, section: ProgramSection,
    launch_queue: int,
    one_group: bool,
) -> None:
    host: Node | None = None
    runs: list[Node] = []
    tails: dict[str, Node] = {}
    positions: dict[str, int] = {}
    places: dict[Node, int] = {}
    ops = program.of_rank(rank).phase(section)
    for op, room in zip(ops, awaited(ops, launch_queue=launch_queue), strict=True):
        issue: Node = ("issue", rank, op.index)
        run: Node = ("run", rank, op.index)
        edges: list[tuple[Node | None, Node]] = [(host, issue)]
        if op.kind in COLLECTIVES:
            position = positions[op.group] = positions.get(op.group, -1) + 1
            members = () if one_group else program.mesh.group(op.group, rank)
            run = ("meet", op.group, members, position)
            if position:  # a communicator is a queue
                edges.append(((*run[:-1], position - 1), run))
        edges += [(issue, run), *((runs[wait], run) for wait in op.waits)]
        if room != NONE:
            edges.append((runs[room], issue))
        if op.stream != "host":
            edges.append((tails.get(op.stream), run))
            tails[op.stream] = run
        digraph.add_nodes_from((issue, run), op=op)
        places[issue] = places[run] = op.index
        for source, target in edges:
            if source is not None and not digraph.has_edge(source, target):
                digraph.add_edge(source, target, rank=rank, ops=(places[source], op.index))
        runs.append(run)
        host = run if op.stream == "host" and (op.waits or leaves_device(op)) else issue
