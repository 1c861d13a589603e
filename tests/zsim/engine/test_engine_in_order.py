"""The engine against a second one that looks at ops in their order and at all ranks at once: no
streams, no events, no queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import STREAMS, Kernel, Op
from zsim.ir.order.launch_queue import NONE, SYNCHRONOUS, awaited
from zsim.ir.program import Program, RankProgram


@dataclass(frozen=True)
class Costs:
    """Kernels and collectives take as many nanoseconds as they have bytes; links are never shared.
    """

    launch_queue: int = 0

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        return sum(kernel.nbytes for kernel in kernels)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        return nbytes

    def usage(self, ranks: tuple[int, ...]) -> Mapping[int, Mapping[str, Fraction]]:
        return {}

    def issue_ns(self, op: Op) -> int:
        return 3 if op.group else len(op.kernels)


def an_op(kind: str, index: int, rng: Random) -> Op:
    """An op of a kind that all ranks share, with waits and kernels of its own; some wait for many
    ops at once."""
    waits = tuple(sorted(rng.sample(range(index), min(index, rng.choice([0, 0, 1, 2, 3, 9, 12])))))
    number = (
        rng.choice([1, 1, 2])
        if kind in ("compute", "all_gather_copy_in")
        else rng.choice([0, 0, 0, 1])
    )
    kernels = tuple(Kernel("copy", 0, rng.randint(1, 400), "float32") for _ in range(number))
    if kind in ("compute", "all_gather_copy_in"):
        return Op(index=index, kind="forward", unit="u", stream=kind, waits=waits, kernels=kernels)
    kind = "host_wait" if rng.random() < 0.5 and not kernels else "copy" if kernels else "free"
    return Op(index=index, kind=kind, unit="u", stream="host", waits=waits, kernels=kernels)


def a_program(rng: Random) -> Program:
    """Ranks of one or several kinds that issue the same collectives and whatever else lies between
    them."""
    mesh = Mesh(dp_replicate=rng.choice([1, 2, 3]), dp_shard=rng.choice([2, 3]))
    axes = ["dp_shard", "world", *(["dp_replicate"] if mesh.dp_replicate > 1 else [])]
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    shared = []
    for _ in range(rng.randint(3, 40)):
        drawn = rng.random()
        other = rng.choice(["compute", "compute", "all_gather_copy_in"]) if drawn < 0.45 else "host"
        shared.append(
            (
                rng.choice(collectives), rng.choice(collectives), rng.choice(axes),
                rng.randint(1, 300),
            )
            if drawn > 0.6
            else other
        )
    kinds = []
    for _ in range(rng.randint(1, mesh.world_size)):
        ops = []
        for index, entry in enumerate(shared):
            if isinstance(entry, str):
                ops.append(an_op(entry, index, rng))
                continue
            kind, stream, group, nbytes = entry
            waits = tuple(sorted(rng.sample(range(index), min(index, rng.choice([0, 1, 9])))))
            ops.append(Op(
                index=index, kind=kind, unit="u", stream=stream, waits=waits, group=group,
                nbytes=nbytes,
            ))
        kinds.append(RankProgram(construction=(), first=(), steady=tuple(ops)))
    drawn_kinds = [rng.randrange(len(kinds)) for _ in range(mesh.world_size)]
    used = sorted(set(drawn_kinds))
    return Program(
        mesh=mesh, ranks=tuple(kinds[kind] for kind in used),
        assignment=tuple(map(used.index, drawn_kinds)),
    )


def in_order(program: Program, costs: Costs) -> tuple[list[list[int]], list[list[int]]]:
    """End of each op of each rank, and when its host has issued it.

    Every rank has as many ops, and a collective has the same index on all ranks.
    """
    ranks = range(program.mesh.world_size)
    ops = [program.of_rank(rank).steady for rank in ranks]
    rooms = [awaited(ops[rank], launch_queue=costs.launch_queue) for rank in ranks]
    ends: list[list[int]] = [[] for _ in ranks]
    issued: list[list[int]] = [[] for _ in ranks]
    streams = [dict.fromkeys(STREAMS, 0) for _ in ranks]
    hosts, gates = [0 for _ in ranks], [0 for _ in ranks]
    queues: dict[tuple[str, tuple[int, ...]], int] = {}
    for index in range(len(ops[0])):
        ready = []
        for rank in ranks:
            op, room = ops[rank][index], rooms[rank][index]
            hosts[rank] = max(
                hosts[rank], gates[rank], ends[rank][room] if room != NONE else 0
            ) + costs.issue_ns(op)
            issued[rank].append(hosts[rank])
            before = 0 if op.stream == "host" else streams[rank][op.stream]
            ready.append(max([hosts[rank], before, *(ends[rank][wait] for wait in op.waits)]))
        for rank in ranks:
            op = ops[rank][index]
            members = program.mesh.group(op.group, rank) if op.group else ()
            began = max([
                ready[rank], queues.get((op.group, members), 0),
                *(ready[member] for member in members),
            ])
            ends[rank].append(began + (op.nbytes if op.group else costs.compute_ns(op.kernels)))
        for rank in ranks:
            op, end = ops[rank][index], ends[rank][index]
            streams[rank][op.stream] = end
            if op.group:
                queues[op.group, program.mesh.group(op.group, rank)] = end
            if op.stream == "host" and op.waits:
                gates[rank] = end
    return ends, issued


@settings(max_examples=60)
@given(
    rng=st.randoms(use_true_random=False),
    launch_queue=st.sampled_from([0, 0, 1, 3, 8, SYNCHRONOUS]),
)
def test_every_op_of_every_rank_ends_when_a_walk_in_order_says(
    rng: Random, launch_queue: int
) -> None:
    program, costs = a_program(rng), Costs(launch_queue)
    wanted = in_order(program, costs)
    whole, folded = simulate(program, costs=costs, all_ranks=True), simulate(program, costs=costs)
    everyone = range(program.mesh.world_size)
    for timeline, ranks in ((whole, everyone), (folded, folded.representatives or everyone)):
        simulated = [timeline.ranks[rank] for rank in ranks]
        assert (
            [list(times.ends) for times in simulated], [list(times.issued) for times in simulated]
        ) == wanted


def test_a_launch_awaits_the_op_that_leaves_room_for_it() -> None:
    """A queue of four: ops of two kernels each. The third makes six, so at least four are launched
    after the first and with the third."""
    ops = [
        Op(
            index=index, kind="forward", unit="u", stream="compute",
            kernels=(Kernel("copy", 0, 1, "float32"),) * 2,
        )
        for index in range(5)
    ]
    assert awaited(ops, launch_queue=4) == [NONE, NONE, 0, 1, 2]
    assert awaited(ops, launch_queue=5) == [NONE, NONE, NONE, 0, 1]
    assert awaited(ops, launch_queue=0) == [NONE] * 5
    assert awaited(ops, launch_queue=SYNCHRONOUS) == [NONE, 0, 1, 2, 3]
