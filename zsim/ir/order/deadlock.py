"""Deadlocks of a Program: rings of ops on several ranks, each of which waits for the one before."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from zsim.ir.ledger import label
from zsim.ir.order.waits import MOST_TOLD, difference
from zsim.ir.program import Program, ProgramSection

if TYPE_CHECKING:
    import networkx

WaitRing = list[tuple[int, tuple[int, int]]]
"""Ranks, each with an op and a later one that waits for it."""


def deadlock(program: Program, *, section: ProgramSection) -> str:
    """A ring of ops in `section` that wait for one another, rank by rank, and the first collectives
    in which its ranks differ; "" where every op can run.

    Ranks that issue in one order have none, for an op waits for earlier ones only. Of several
    orders one rank each is asked at first, as if all groups of a name were one. That has every ring
    of the whole, and all ranks are asked only where it has one.
    """
    orders: dict[tuple[object, ...], int] = {}
    for kind, rank in {kind: rank for rank, kind in enumerate(program.assignment)}.items():
        ops = program.ranks[kind].phase(section)
        orders.setdefault(tuple((op.stream, op.waits, op.group) for op in ops), rank)
    if len(orders) < 2:
        return ""
    from zsim.ir.order.graph import graph  # networkx takes 60 ms, which few Programs need

    folded = graph(program, section=section, ranks=orders.values(), one_group=True)
    if not _ring(folded):
        return ""
    texts = []
    for rank, places in (ring := _ring(graph(program, section=section)))[:MOST_TOLD]:
        ops = program.of_rank(rank).phase(section)
        before, after = (f"op {index} ({label(ops[index])})" for index in places)
        texts.append(f"on rank {rank} {after} comes after {before}")
    kinds: dict[frozenset[int], str] = {}
    for (rank, _), (other, _) in pairwise((*ring, *ring[:1])):
        pair = frozenset(program.assignment[each] for each in (rank, other))
        if len(pair) > 1 and pair not in kinds:
            differs = difference(program, rank, other, section=section)
            kinds[pair] = f"first difference: on rank {rank} {differs}"
    cut = ["…"] if len(ring) > MOST_TOLD else []
    return "; ".join([*texts, *cut, *list(kinds.values())[:MOST_TOLD]])


def _ring(digraph: networkx.DiGraph) -> WaitRing:
    """A short ring of the graph, rank by rank; empty where it has none."""
    import networkx

    try:
        cycle = networkx.find_cycle(digraph)
    except networkx.NetworkXNoCycle:
        return []
    ring = min((networkx.shortest_path(digraph, end, start) for start, end in cycle), key=len)
    edges = [digraph.edges[pair] for pair in zip(ring, (*ring[1:], ring[0]), strict=True)]
    ranks = [edge["rank"] for edge in edges]
    _, turn = min((rank, at) for at, rank in enumerate(ranks) if rank != ranks[at - 1])
    runs = groupby((*edges[turn:], *edges[:turn]), key=lambda edge: int(edge["rank"]))
    own = ((rank, list(same)) for rank, same in runs)
    return [(rank, (same[0]["ops"][0], same[-1]["ops"][1])) for rank, same in own]
