"""One op as one line of text, and back.

4  all_gather      blocks.1   all_gather  group=dp_shard 33,408 B  dtype=float32  after 3  | +
communication blocks.1.out 33,408 B

Fields that have their default are left out. After the first " | " come kernels ("linear 1x4x8x2 128
flop 112 B float32", with a "t" after the sizes of a product whose first factor lies transposed, and
at the end "8 singly" and "9 launches" where it has them). Then come memory events in order ("+ kind
buffer bytes" and "- buffer"). Those of host memory come last, and end in "in host", "in pinned"
or "in locked".
"""

from __future__ import annotations

import re
from typing import Any, cast

from zsim.errors import ProgramError
from zsim.ir.buffers import Buffer
from zsim.ir.ops import (
    MEMORY_KINDS,
    OP_KINDS,
    STREAMS,
    Alloc,
    Free,
    HostAlloc,
    HostEvent,
    Kernel,
    Location,
    MemoryEvent,
    Op,
)

_OP = re.compile(
    r"\s*(?P<index>\d+)  (?P<kind>\w+) +(?P<unit>\S+) +(?P<stream>\w+)"
    r"(?:  group=(?P<group>\S+) (?P<nbytes>[\d,]+) B)?"
    r"(?:  dtype=(?P<dtype>\w+))?(?:  root=(?P<root>\d+))?"
    r"(?:  micro_batch=(?P<micro_batch>\d+))?(?:  reads=(?P<reads>\S+))?"
    r"(?:  after (?P<waits>[\d,]+))?(?P<rest>(?: \| .*)?)"
)
_KERNEL = re.compile(
    r"(\S+)(?: (\d+(?:x\d+)+)(t)?)? ([\d,]+) flop ([\d,]+) B (\w+)(?: on (link|host|drive|files))?"
    r"(?: ([\d,]+) singly)?(?: ([\d,]+) launches)?"
)
_ALLOC = re.compile(r"\+ (\w+) (\S+) ([\d,]+) B(?: in (host|pinned|locked))?")


IN_HOST = " in host"
"""End of a free of host memory."""


def _format_kernel(kernel: Kernel) -> str:
    location = "" if kernel.location == "device" else f" on {kernel.location}"
    shape = f" {'x'.join(map(str, kernel.shape))}{'t' * kernel.transposed}" if kernel.shape else ""
    singly = f" {kernel.singly:,} singly" if kernel.singly else ""
    launches = f" {kernel.launches:,} launches" if kernel.launches else ""
    return (
        f"{kernel.operator}{shape} {kernel.flops:,} flop {kernel.nbytes:,} B "
        f"{kernel.dtype}{location}{singly}{launches}"
    )


def format_op(op: Op) -> str:
    """One line: index, kind, unit, stream, then what the op has."""
    text = f"{op.index:5d}  {op.kind:<14} {op.unit:<12} {op.stream:<10}".rstrip()
    text += f"  group={op.group} {op.nbytes:,} B" if op.group else ""
    text += f"  dtype={op.dtype}" if op.dtype else ""
    text += f"  root={op.root}" if op.root else ""
    text += f"  micro_batch={op.micro_batch}" if op.micro_batch else ""
    text += f"  reads={','.join(op.reads)}" if op.reads else ""
    text += f"  after {','.join(map(str, op.waits))}" if op.waits else ""
    kernels = [_format_kernel(kernel) for kernel in op.kernels]
    return " | ".join([text, *kernels, *map(_format_event, op.memory), *map(_on_host, op.host)])


def _format_event(event: MemoryEvent) -> str:
    return (
        f"- {event.buffer}"
        if isinstance(event, Free)
        else f"+ {event.kind} {event.buffer} {event.nbytes:,} B"
    )


def _on_host(event: HostEvent) -> str:
    if isinstance(event, Free):
        return f"- {event.buffer} in host"
    where = "pinned" if event.pinned else "locked" if event.locked else "host"
    return f"+ {event.kind} {event.buffer} {event.nbytes:,} B in {where}"


def bad_line(number: int, line: str, expected: str) -> ProgramError:
    """The error of line `number`, which does not read as `expected`."""
    return ProgramError(where=f"line {number}", expected=expected, found=repr(line[:80]))


def _number(text: str | None) -> int:
    return int(text.replace(",", "")) if text else 0


def parse_op(line: str, *, number: int = 1) -> Op:
    """The op of one line of `format_op`; ProgramError where it does not parse."""
    match = _OP.fullmatch(line)
    if match is None or match["kind"] not in OP_KINDS or match["stream"] not in STREAMS:
        raise bad_line(number, line, "an op: index, kind, unit, stream, …")
    kernels: list[Kernel] = []
    memory: list[MemoryEvent] = []
    host: list[HostEvent] = []
    for part in match["rest"].split(" | ")[1:]:
        kernel, alloc = _KERNEL.fullmatch(part), _ALLOC.fullmatch(part)
        if part.startswith("- "):
            buffer = Buffer(part[2:].removesuffix(IN_HOST))
            (memory if buffer == part[2:] else host).append(Free(buffer))
        elif alloc is not None and alloc[1] in MEMORY_KINDS:
            kind, nbytes = cast(Any, alloc[1]), _number(alloc[3])
            if alloc[4]:
                host.append(HostAlloc(
                    Buffer(alloc[2]), kind, nbytes, alloc[4] == "pinned", alloc[4] == "locked"
                ))
            else:
                memory.append(Alloc(Buffer(alloc[2]), kind, nbytes))
        elif kernel is not None:
            shape = tuple(map(int, kernel[2].split("x"))) if kernel[2] else ()
            location = cast(Location, kernel[7] or "device")
            kernels.append(
                Kernel(
                    kernel[1], _number(kernel[4]), _number(kernel[5]), kernel[6], location, shape,
                    kernel[3] is not None, _number(kernel[8]), _number(kernel[9]),
                )
            )
        else:
            raise bad_line(number, part, "a kernel, an allocation or a free")
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
        reads=tuple(match["reads"].split(",")) if match["reads"] else (),
        kernels=tuple(kernels),
        memory=tuple(memory),
        host=tuple(host),
    )
