"""The Program: the ops that each rank's host issues, in order. Strategies make it, backends
interpret it.

A Program is data. It knows no time, no torch and no strategy. It has two orders. Ops stand in the
order in which the host issues them, and memory follows it. An op's `waits` are the ends of earlier
ops that its stream waits for, and time follows streams and waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from operator import is_
from typing import Any, Literal, cast

from zsim.errors import listed
from zsim.ir.mesh import AXES, Mesh
from zsim.ir.ops import Op, OpKind
from zsim.ir.text import bad_line, format_op, parse_op

PhaseName = Literal["construction", "first", "steady"]
PHASES: tuple[PhaseName, ...] = PhaseName.__args__  # type: ignore[attr-defined]
SECOND = "second"
"""Name, in text, of the ops between the first step and a steady one."""
ProgramSection = PhaseName | Literal["second"]
SECTIONS: tuple[ProgramSection, ...] = ("construction", "first", "second", "steady")
PartName = Literal["forward", "backward", "optimizer", "zero_grad"]
PARTS: tuple[PartName, ...] = PartName.__args__  # type: ignore[attr-defined]


Room = Literal["enough", "tight", "none"]
"""Room for what a rank needs: for all of it, for what lives or perhaps not, for less."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step, as a training loop calls it: from the op with the index `start` to where
    the next part starts.

    Forward and backward are of one micro-batch; clipping belongs to the optimizer.
    """

    name: PartName
    start: int
    micro_batch: int = 0


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    """The ops of one kind of rank, by phase. Buffers that live at the end of a phase live at the
    start of the next.

    `second` holds the ops that only the second step has, at its start, as those with which DDP
    rebuilds its buckets. The parts of a step may be left out.
    """

    construction: tuple[Op, ...]
    first: tuple[Op, ...]
    steady: tuple[Op, ...]
    second: tuple[Op, ...] = ()
    first_parts: tuple[StepPart, ...] = ()
    steady_parts: tuple[StepPart, ...] = ()

    def phase(self, name: ProgramSection) -> tuple[Op, ...]:
        """The ops of the phase `name`, or `second`."""
        ops: tuple[Op, ...] = getattr(self, name)
        return ops

    def before(self, name: PhaseName) -> tuple[Op, ...]:
        """The ops between the phase before `name` and that: `second` before the steady step."""
        return self.second if name == "steady" else ()

    def parts(self, name: PhaseName) -> tuple[StepPart, ...]:
        """The parts of the phase `name`; construction has none."""
        return {"construction": (), "first": self.first_parts, "steady": self.steady_parts}[name]

    @cached_property
    def collectives(self) -> dict[str, set[OpKind]]:
        """The groups that it communicates in, in the order of their first ops, and the kinds of
        ops there."""
        groups: dict[str, set[OpKind]] = {}
        for ops in map(self.phase, SECTIONS):
            for name, kind in dict.fromkeys([(op.group, op.kind) for op in ops if op.group]):
                groups.setdefault(name, set()).add(kind)
        return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The distinct rank programs; rank r runs `ranks[assignment[r]]`.

    `str(program)` is its text, one line per op; `parse` reads it back.

    >>> from zsim.ir.ops import Alloc, Free, Kernel
    >>> gather = Op(
    ...     0, "all_gather", "blocks.0", "all_gather", group="dp_shard", nbytes=4096,
    ...     memory=(Alloc("blocks.0:unsharded", "unsharded_parameters", 4096),),
    ... )
    >>> forward = Op(
    ...     1, "forward", "blocks.0", "compute", waits=(0,), reads=("blocks.0",),
    ...     kernels=(Kernel("linear", 8192, 6144, "float32"),),
    ... )
    >>> reshard = Op(2, "free", "blocks.0", "host", memory=(Free("blocks.0:unsharded"),))
    >>> rank = RankProgram(construction=(), first=(), steady=(gather, forward, reshard))
    >>> program = Program(mesh=Mesh(dp_shard=2), ranks=(rank,), assignment=(0, 0))
    >>> for line in str(program).splitlines():
    ...     print(line.replace(" | ", "\\n        | "))
    mesh dp_replicate=1 dp_shard=2
    assignment 0x2
    program 0
    phase construction
    phase first
    phase steady
        0  all_gather     blocks.0     all_gather  group=dp_shard 4,096 B
            | + unsharded_parameters blocks.0:unsharded 4,096 B
        1  forward        blocks.0     compute  reads=blocks.0  after 0
            | linear 8,192 flop 6,144 B float32
        2  free           blocks.0     host
            | - blocks.0:unsharded
    >>> parse(str(program)) == program
    True
    """

    mesh: Mesh
    ranks: tuple[RankProgram, ...]
    assignment: tuple[int, ...] = field(repr=False)
    room: Room = "enough"
    """Room of the device that it runs on, as `zsim.memory.full_device` says. It follows
    from the device, as the driver's calls do, so that a Program's text has neither."""

    def of_rank(self, rank: int) -> RankProgram:
        """The rank program of `rank`."""
        return self.ranks[self.assignment[rank]]

    @property
    def steps(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of steady steps, once each: ranks that only faults tell apart share theirs."""
        return tuple({id(kind.steady): kind.steady for kind in self.ranks}.values())

    def __repr__(self) -> str:
        ranks, kinds = len(self.assignment), len(self.ranks)
        ops = sum(len(rank.steady) for rank in self.ranks)
        return f"<Program: {ranks:,} ranks, {kinds:,} apart, {ops:,} ops in a step; str() has them>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis and IPython print it so

    def __str__(self) -> str:
        axes = " ".join(f"{axis}={size}" for axis, size in zip(AXES, self.mesh.shape, strict=True))
        runs = " ".join(f"{kind}x{len(list(same))}" for kind, same in groupby(self.assignment))
        lines = [f"mesh {axes}", f"assignment {runs}"]
        for number, rank in enumerate(self.ranks):
            lines.append(f"program {number}")
            for phase in PHASES:
                if before := rank.before(phase):
                    lines += [f"phase {SECOND}", *_phase_lines(before, ())]
                lines.append(f"phase {phase}")
                lines += _phase_lines(rank.phase(phase), rank.parts(phase))
        return "\n".join(lines) + "\n"


def _phase_lines(ops: tuple[Op, ...], parts: tuple[StepPart, ...]) -> Iterator[str]:
    """One line per op, and one before each part."""
    begins: dict[int, list[str]] = {}
    for part in parts:
        begins.setdefault(part.start, []).append(
            f"part {part.name}{f' {part.micro_batch}' if part.micro_batch else ''}"
        )
    for op in ops:
        yield from begins.pop(op.index, ())
        yield format_op(op)
    yield from (line for lines in begins.values() for line in lines)


def begin_alike(ops: Sequence[Op], others: Sequence[Op]) -> int:
    """The number of ops that both begin with: the same objects, as of passes planned once."""
    return len(list(takewhile(bool, map(is_, ops, others))))


def parse(text: str) -> Program:
    """The Program that `str(program)` wrote; ProgramError with the line where it does not parse."""
    lines = text.splitlines()
    if len(lines) < 2:
        raise bad_line(1, text, "mesh and assignment")
    sizes = re.fullmatch(r"mesh dp_replicate=(\d{1,7}) dp_shard=(\d{1,7})", lines[0])
    runs = re.fullmatch(r"assignment((?: \d{1,7}x\d{1,7})+)", lines[1])
    if sizes is None or runs is None:
        raise bad_line(
            1 if sizes is None else 2, lines[0 if sizes is None else 1],
            "mesh sizes, then the assignment of ranks",
        )
    assignment = [
        int(kind)
        for run in runs[1].split()
        for kind, count in [run.split("x")]
        for _ in range(int(count))
    ]
    return Program(
        mesh=Mesh(dp_replicate=int(sizes[1]), dp_shard=int(sizes[2])),
        ranks=tuple(_rank_programs(enumerate(lines[2:], 3))),
        assignment=tuple(assignment),
    )


def _rank_programs(lines: Iterable[tuple[int, str]]) -> Iterator[RankProgram]:
    phases: dict[str, list[Op]] = {}
    parts: dict[str, list[StepPart]] = {}
    current: list[Op] | None = None
    for number, line in lines:
        if line.startswith("program "):
            if phases:
                yield _rank_program(phases, parts, number)
            phases, parts, current = {}, {}, None
        elif line.startswith("phase "):
            current = phases.setdefault(line[6:], [])
        elif current is None:
            raise bad_line(number, line, "program N, then phase NAME")
        elif line.startswith("part "):
            phase = next(reversed(phases))
            if phase in ("construction", SECOND):
                raise bad_line(number, line, f"no part of {phase}, which is one")
            parts.setdefault(phase, []).append(_part(line, len(current), number))
        else:
            current.append(parse_op(line, number=number))
    yield _rank_program(phases, parts, 0)


def _part(line: str, start: int, number: int) -> StepPart:
    match = re.fullmatch(rf"part ({'|'.join(PARTS)})(?: (\d{{1,7}}))?", line)
    if match is None:
        raise bad_line(number, line, f"part {listed(PARTS)}, then its micro-batch")
    return StepPart(cast(PartName, match[1]), start, int(match[2] or 0))


def _rank_program(
    phases: dict[str, list[Op]], parts: dict[str, list[StepPart]], number: int
) -> RankProgram:
    if tuple(phases) not in (PHASES, SECTIONS):
        raise bad_line(number, " ".join(phases), f"the phases {listed(PHASES, 'and')}, with or "
                                                 f"without {SECOND} before the last")
    return RankProgram(
        **{name: tuple(ops) for name, ops in phases.items()},
        first_parts=tuple(parts.get("first", ())),
        steady_parts=tuple(parts.get("steady", ())),
    )
