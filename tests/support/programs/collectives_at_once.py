"""Steps of collectives and nothing else, which all ranks issue alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.links import Link
from zsim.engine.costs.op_costs import Costs
from zsim.engine.events.prepared import Prepared
from zsim.engine.simulate import simulate_round
from zsim.engine.timeline import Delays, Timeline
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Op, OpKind
from zsim.ir.program import Program, RankProgram


def op(kind: OpKind, nbytes: int, *, group: str = "dp_shard", index: int = 0, root: int = 0) -> Op:
    """A collective on the stream of its group."""
    stream = "all_reduce" if group == "dp_replicate" else "all_gather"
    return Op(
        index=index, kind=kind, unit="a", stream=stream, group=group, nbytes=nbytes, root=root
    )


def alike(mesh: Mesh, *ops: Op, late: int | None = None) -> Program:
    """The Program whose ranks all issue `ops`; that of a `late` rank is another, for delays of its
    own."""
    ranks = (RankProgram(construction=(), first=(), steady=ops),) * (1 if late is None else 2)
    assignment = tuple([int(rank == late) for rank in range(mesh.world_size)])
    return Program(mesh=mesh, ranks=ranks, assignment=assignment)


def as_flows(
    program: Program, costs: Costs, delays: Sequence[Delays] = (), *, contention: bool = True
) -> Timeline:
    """The times with collectives as flows, on all ranks."""
    prepared = Prepared(program, costs=costs, all_ranks=True, contention=contention)
    return simulate_round(prepared, delays)


def as_steps(
    program: Program, costs: Costs, delays: Sequence[Delays] = (), *, contention: bool = True
) -> Timeline:
    """The times with rings as steps, and all hops."""
    prepared = Prepared(program, costs=costs, contention=contention, stepwise=costs, note_hops=True)
    return simulate_round(prepared, delays)


def bandwidth_alone(cluster: ClusterSpec) -> ClusterSpec:
    """`cluster` with textbook rings, and without latencies."""

    def quick(link: Link) -> Link:
        return replace(link, latency=0)

    links = cluster.links
    return replace(
        cluster,
        collectives="ring",
        overheads=replace(cluster.overheads, collective=0),
        links=replace(
            links, fabric=quick(links.fabric), pcie=quick(links.pcie), rail=quick(links.rail)
        ),
    )
