"""Rules of the IR, required of every Program before a backend interprets it: well-formed ops,
existing waits, live buffers, ranks that meet.

The first breach is an error. `zsim.ir.laws.program_laws` has the laws of a correct strategy beyond
that.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, zip_longest

from zsim.errors import ProgramError
from zsim.ir.ledger import label
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, OP_KINDS, STREAMS, Op
from zsim.ir.program import PHASES, SECTIONS, Program, begin_alike

Signature = tuple[str, int, str, int]
Sequences = dict[str, list[tuple[Op, Signature]]]


def validate(program: Program, *, memory: bool = True) -> Program:
    """`program` itself; ProgramError at its first breach of the rules of the IR, with the rank and
    the op.

    Without `memory` allocations and frees are left to whoever replays them anyway.
    """
    mesh, used, known = program.mesh, set(program.assignment), set(range(len(program.ranks)))
    if len(program.assignment) != mesh.world_size:
        raise ProgramError(
            where="assignment", expected=f"{mesh.world_size} ranks",
            found=str(len(program.assignment)),
        )
    if used != known:
        raise ProgramError(
            where="assignment", expected=f"each program of {sorted(known)} on some rank",
            found=str(sorted(used)),
        )
    sizes, checked = _Sizes(mesh), dict[str, tuple[Op, ...]]()
    for number, rank in enumerate(program.ranks):
        for section in SECTIONS:
            ops = rank.phase(section)
            done = max((begin_alike(ops, others) for others in checked.values()), default=0)
            checked[section] = ops
            for index, op in enumerate(ops[done:], start=done):
                problem = _problem(op, index, sizes)
                if problem is not None:
                    where = f"program {number}, {section} op {index} ({label(op)})"
                    raise ProgramError(where=where, expected=problem[0], found=problem[1])
        for phase in PHASES[1:]:
            starts = [part.start for part in rank.parts(phase)]
            if starts and (
                starts[0] or starts != sorted(set(starts)) or starts[-1] > len(rank.phase(phase))
            ):
                expected = (
                    f"parts that begin at op 0 and one after another up to op "
                    f"{len(rank.phase(phase))}"
                )
                raise ProgramError(
                    where=f"program {number}, {phase}", expected=expected,
                    found=f"begins at {starts}",
                )
        if memory:
            replay(rank, timeline=False)
    for section in SECTIONS:
        _check_meetings(
            program, section, [collective_sequences(rank.phase(section)) for rank in program.ranks]
        )
    return program


class _Sizes(dict[str, int]):
    """Ranks of each group by name, 0 where there is no such group."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __missing__(self, name: str) -> int:
        try:
            self[name] = self.mesh.size(name)
        except KeyError:
            self[name] = 0
        return self[name]


def _problem(op: Op, index: int, sizes: _Sizes) -> tuple[str, str] | None:
    """Expected and found text of the rule that this op breaks; None where it breaks none."""
    if op.index != index:
        return f"index {index}", str(op.index)
    if op.kind not in OP_KINDS or op.stream not in STREAMS:
        return "a known kind and stream", f"{op.kind} on {op.stream}"
    if op.waits and not (min(op.waits) >= 0 and max(op.waits) < index):
        return "waits for earlier ops", f"waits for {op.waits}"
    if op.kind not in COLLECTIVES:
        return ("no group, as it is no collective", op.group) if op.group else None
    if sizes[op.group] < 2:
        return f"a group of more than one rank on {sizes.mesh}", op.group or "none"
    return ("bytes to communicate", str(op.nbytes)) if op.nbytes <= 0 else None


def collective_sequences(ops: tuple[Op, ...]) -> Sequences:
    """Collectives of each group in issue order, each with the signature on which all members must
    agree."""
    sequences: Sequences = {}
    for op in ops:
        if op.kind in COLLECTIVES:
            sequences.setdefault(op.group, []).append((op, (op.kind, op.nbytes, op.dtype, op.root)))
    return sequences


def _check_meetings(program: Program, phase: str, sequences: list[Sequences]) -> None:
    """Kinds of rank that share a group must issue the same collectives over it in the same order.
    """
    if len(program.ranks) == 1:
        return
    for axis in sorted({axis for sequence in sequences for axis in sequence}):
        for left, right in _neighbours(program.mesh, program.assignment, axis):
            pairs = zip_longest(sequences[left].get(axis, []), sequences[right].get(axis, []))
            for mine, theirs in pairs:
                if mine is None or theirs is None or mine[1] != theirs[1]:
                    where = f"{phase}, group {axis}, programs {left} and {right}"
                    raise ProgramError(
                        where=where,
                        expected="the same collectives in the same order",
                        found=f"{_described(mine)} against {_described(theirs)}",
                    )


@lru_cache(maxsize=64)
def _neighbours(
    mesh: Mesh, assignment: tuple[int, ...], axis: str
) -> tuple[tuple[int, int], ...]:
    """Pairs of programs that meet in some group of `axis`, each once."""
    pairs = dict[tuple[int, int], None]()
    for group in mesh.groups(axis):
        for pair in pairwise([assignment[rank] for rank in group]):
            if pair[0] != pair[1]:
                pairs[pair] = None
    return tuple(pairs)


def _described(member: tuple[Op, Signature] | None) -> str:
    if member is None:
        return "none"
    op, (kind, nbytes, dtype, _) = member
    return f"op {op.index}, {kind} {op.unit} of {nbytes:,} B {dtype}"
