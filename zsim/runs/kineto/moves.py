"""Collectives of a trace: NCCL's kernels on a GPU, gloo's works on a CPU.

Kernels of NCCL carry the arguments of their collective. On a CPU the sizes are those of the c10d
operator, which the profiler tells with record_shapes; the times are those of gloo's own threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from zsim.errors import shown
from zsim.runs.kineto.trace_file import KinetoError, KinetoTrace, TraceEvent

KINDS = {
    "allgather": "all_gather", "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce", "broadcast": "broadcast", "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}
"""Kinds of collectives by c10d's names, less what torch puts behind them."""
BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "int": 4,
    "long": 8, "long int": 8, "byte": 1, "char": 1, "bool": 1, "unsigned char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}
"""Bytes of an element by the profiler's names of dtypes, in lower case."""
GLOO = {"reduce_scatter": "gloo:all_reduce"}
"""Names of gloo's works that differ from the collective's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One collective of a rank, with the group's ranks; times are the trace's ns."""

    kind: str
    nbytes: int
    ranks: tuple[int, ...]
    issued_ns: int
    start_ns: int
    end_ns: int


def is_nccl(event: TraceEvent) -> bool:
    """True for a kernel of NCCL."""
    return event.category == "kernel" and event.name.startswith("nccl")


def on_gpu(
    trace: KinetoTrace, kernels: Sequence[tuple[TraceEvent, TraceEvent]]
) -> Iterator[Moved]:
    """The collectives among `kernels`, each with its launch, in the order of launches."""
    for kernel, launch in sorted(kernels, key=lambda pair: pair[1].start_ns):
        args = kernel.args
        kind = KINDS.get(str(args.get("Collective name", "")).rstrip("_"))
        size = "Out msg nelems" if kind == "all_gather" else "In msg nelems"
        numel, width = args.get(size), BYTES.get(str(args.get("dtype", "")).lower())
        if kind is None or type(numel) is not int or numel < 1 or width is None:
            raise KinetoError(
                where=f"{trace.path}: {kernel.name[:60]}",
                expected=f"Collective name, {size} and dtype that zsim knows",
                found=shown(dict(args))[:120],
                remedy="profile with torch >=2.4, which tells them; sends are not read",
            )
        ranks = _ranks(trace, args)
        if len(ranks) > 1:
            yield Moved(
                kind=kind, nbytes=numel * width, ranks=ranks, issued_ns=launch.start_ns,
                start_ns=kernel.start_ns, end_ns=kernel.end_ns,
            )


def _ranks(trace: KinetoTrace, args: Any) -> tuple[int, ...]:
    """The ranks of a collective's process group."""
    name = str(args.get("Process Group Name", ""))
    if name in trace.groups:
        return trace.groups[name]
    try:
        ranks = json.loads(str(args.get("Process Group Ranks", "")))
        if ranks and all(type(rank) is int for rank in ranks):
            return tuple(ranks)
    except (ValueError, TypeError, RecursionError):
        pass
    if args.get("Group size") == trace.world_size:
        return tuple(range(trace.world_size))
    raise KinetoError(
        where=str(trace.path), expected="a process group of distributedInfo",
        found=shown(name)[:60], remedy="export whole traces, and do not cut them",
    )


def on_cpu(trace: KinetoTrace, start_ns: int, end_ns: int) -> Iterator[Moved]:
    """The collectives whose c10d operator is called from `start_ns` on and before `end_ns`.

    KinetoError where the trace has several groups: it does not tell those of operators.
    """
    runs = [event for event in trace.events if event.name.startswith("gloo:")]
    for call in trace.events:
        kind = KINDS.get(call.name.removeprefix("c10d::").rstrip("_"))
        if kind is None or not call.name.startswith("c10d::"):
            continue
        name = GLOO.get(kind, f"gloo:{kind}")
        run = next(
            (each for each in runs if each.name == name and each.end_ns >= call.start_ns), call
        )
        if run is not call:
            runs.remove(run)
        if not start_ns <= call.start_ns < end_ns or trace.world_size == 1:
            continue
        if len(set(trace.groups.values())) > 1:
            raise KinetoError(
                where=str(trace.path), expected="one process group, where there is no GPU",
                found=f"{len(trace.groups)}", remedy="import a trace of NCCL's kernels",
            )
        yield Moved(
            kind=kind, nbytes=_nbytes(trace, call, run, kind),
            ranks=tuple(range(trace.world_size)), issued_ns=call.start_ns,
            start_ns=max(call.start_ns, run.start_ns), end_ns=max(call.end_ns, run.end_ns)
            if run is call else run.end_ns,
        )


def _nbytes(trace: KinetoTrace, call: TraceEvent, run: TraceEvent, kind: str) -> int:
    """Bytes of a c10d operator's payload, by the shapes and types of its inputs."""
    position = 1 if kind in ("reduce_scatter", "all_to_all") else 0
    try:
        shape, dtype = call.args["Input Dims"][position], call.args["Input type"][position]
        if dtype == "TensorList":
            dtype = run.args["Input type"][0]
        shapes = shape if shape and isinstance(shape[0], list) else [shape]
        nbytes = sum(prod(each) for each in shapes) * BYTES[str(dtype).lower()]
        if type(nbytes) is int and nbytes > 0:
            return nbytes
    except (KeyError, IndexError, TypeError):
        pass
    raise KinetoError(
        where=f"{trace.path}: {call.name}", expected="the shapes and dtypes of its tensors",
        found=shown(dict(call.args))[:120], remedy="profile with record_shapes=True",
    )
