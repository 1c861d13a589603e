"""A Program as text, one line per op, and back: what `zsim show --program` prints and what golden files hold.

    4  all_gather      blocks.1   all_gather  group=dp_shard 33,408 B float32  after 3  | + communication blocks.1.out 33,408 B

Fields that have their default are left out. After the first " | " come kernels ("linear 412 flop 128 B float32") and memory
events in order ("+ kind buffer bytes" and "- buffer").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, cast

from zsim.errors import ProgramError
from zsim.mesh import AXES, Mesh
from zsim.program import (
    MEMORY_KINDS,
    OP_KINDS,
    PHASES,
    STREAMS,
    Alloc,
    Free,
    Kernel,
    MemoryEvent,
    Op,
    Program,
    RankProgram,
)

_OP = re.compile(
    r"\s*(?P<index>\d+)  (?P<kind>\w+) +(?P<unit>\S+) +(?P<stream>\w+)"
    r"(?:  group=(?P<group>\S+) (?P<nbytes>[\d,]+) B)?(?:  dtype=(?P<dtype>\w+))?(?:  root=(?P<root>\d+))?"
    r"(?:  micro_batch=(?P<micro_batch>\d+))?(?:  after (?P<waits>[\d,]+))?(?P<rest>(?: \| .*)?)"
)
_KERNEL = re.compile(r"(\S+) ([\d,]+) flop ([\d,]+) B (\w+)")
_ALLOC = re.compile(r"\+ (\w+) (\S+) ([\d,]+) B")


def format_op(op: Op) -> str:
    """One line: index, kind, unit, stream, then what the op has."""
    text = f"{op.index:5d}  {op.kind:<14} {op.unit:<12} {op.stream:<10}".rstrip()
    text += f"  group={op.group} {op.nbytes:,} B" if op.group else ""
    text += f"  dtype={op.dtype}" if op.dtype else ""
    text += f"  root={op.root}" if op.root else ""
    text += f"  micro_batch={op.micro_batch}" if op.micro_batch else ""
    text += f"  after {','.join(map(str, op.waits))}" if op.waits else ""
    kernels = [f"{k.operator} {k.flops:,} flop {k.nbytes:,} B {k.dtype}" for k in op.kernels]
    return " | ".join([text, *kernels, *map(_format_event, op.memory)])


def _format_event(event: MemoryEvent) -> str:
    return f"- {event.buffer}" if isinstance(event, Free) else f"+ {event.kind} {event.buffer} {event.nbytes:,} B"


def format_program(program: Program) -> str:
    """The mesh, which ranks run which program, and every program's phases."""
    axes = " ".join(f"{axis}={size}" for axis, size in zip(AXES, program.mesh.shape, strict=True))
    runs = " ".join(f"{kind}x{len(list(same))}" for kind, same in groupby(program.assignment))
    lines = [f"mesh {axes}", f"assignment {runs}"]
    for number, rank in enumerate(program.ranks):
        lines.append(f"program {number}")
        for phase in PHASES:
            lines.append(f"phase {phase}")
            lines += map(format_op, rank.phase(phase))
    return "\n".join(lines) + "\n"


def _bad(number: int, line: str, expected: str) -> ProgramError:
    return ProgramError(where=f"line {number}", expected=expected, found=repr(line[:80]))


def _number(text: str | None) -> int:
    return int(text.replace(",", "")) if text else 0


def parse_op(line: str, *, number: int = 1) -> Op:
    """The op of one line of `format_op`; ProgramError where it does not parse."""
    match = _OP.fullmatch(line)
    if match is None or match["kind"] not in OP_KINDS or match["stream"] not in STREAMS:
        raise _bad(number, line, "an op: index, kind, unit, stream, …")
    kernels: list[Kernel] = []
    memory: list[MemoryEvent] = []
    for part in match["rest"].split(" | ")[1:]:
        kernel, alloc = _KERNEL.fullmatch(part), _ALLOC.fullmatch(part)
        if part.startswith("- "):
            memory.append(Free(part[2:]))
        elif alloc is not None and alloc[1] in MEMORY_KINDS:
            memory.append(Alloc(alloc[2], cast(Any, alloc[1]), _number(alloc[3])))
        elif kernel is not None:
            kernels.append(Kernel(kernel[1], _number(kernel[2]), _number(kernel[3]), kernel[4]))
        else:
            raise _bad(number, part, "a kernel, an allocation or a free")
    return Op(
        index=int(match["index"]),
        kind=cast(Any, match["kind"]),
        unit=match["unit"],
        stream=cast(Any, match["stream"]),
        waits=tuple(map(int, match["waits"].split(","))) if match["waits"] else (),
        group=match["group"] or "",
        nbytes=_number(match["nbytes"]),
        root=_number(match["root"]),
        dtype=match["dtype"] or "",
        micro_batch=_number(match["micro_batch"]),
        kernels=tuple(kernels),
        memory=tuple(memory),
    )


def parse(text: str) -> Program:
    """The Program that `format_program` wrote; ProgramError with the line where it does not parse."""
    lines = text.splitlines()
    if len(lines) < 2:
        raise _bad(1, text, "mesh and assignment")
    sizes = re.fullmatch(r"mesh dp_replicate=(\d{1,7}) dp_shard=(\d{1,7})", lines[0])
    runs = re.fullmatch(r"assignment((?: \d{1,7}x\d{1,7})+)", lines[1])
    if sizes is None or runs is None:
        raise _bad(1 if sizes is None else 2, lines[0 if sizes is None else 1], "mesh sizes, then the assignment of ranks")
    assignment = [int(kind) for run in runs[1].split() for kind, count in [run.split("x")] for _ in range(int(count))]
    return Program(
        mesh=Mesh(dp_replicate=int(sizes[1]), dp_shard=int(sizes[2])),
        ranks=tuple(_rank_programs(enumerate(lines[2:], 3))),
        assignment=tuple(assignment),
    )


def _rank_programs(lines: Iterable[tuple[int, str]]) -> Iterator[RankProgram]:
    phases: dict[str, list[Op]] = {}
    current: list[Op] | None = None
    for number, line in lines:
        if line.startswith("program "):
            if phases:
                yield _rank_program(phases, number)
            phases, current = {}, None
        elif line.startswith("phase "):
            current = phases.setdefault(line[6:], [])
        elif current is None:
            raise _bad(number, line, "program N, then phase NAME")
        else:
            current.append(parse_op(line, number=number))
    yield _rank_program(phases, 0)


def _rank_program(phases: dict[str, list[Op]], number: int) -> RankProgram:
    if tuple(phases) != PHASES:
        raise _bad(number, " ".join(phases), f"the phases {', '.join(PHASES)}")
    return RankProgram(**{name: tuple(ops) for name, ops in phases.items()})
