"""Laws that every correct Program obeys, whatever the strategy and the model.

A law is a function that yields its breaches as text. The command `zsim validate` asks all of them
before it starts anything real. The command `zsim run` does not, since they cost as much time as
planning. Well-formed ops, buffers and meetings are required of each Program by
`zsim.ir.laws.validate`. Runs have their laws in `zsim.ir.laws.run_laws`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from zsim.errors import ProgramError
from zsim.ir.laws.rank_step import STEPS, RankStep, rank_steps, unsharded
from zsim.ir.ledger import label
from zsim.ir.ops import COLLECTIVES, Alloc, Free, Stream
from zsim.ir.order.deadlock import deadlock
from zsim.ir.program import Program

COMPUTE = frozenset({"forward", "backward", "recompute"})
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "all_to_all"})
"""Kinds of ops, and the streams on which they are issued."""
GATHERS = frozenset({"all_gather", "broadcast"})
GATHER_STREAMS = frozenset({"all_gather", "all_gather_copy_in", "to_device", "drive_read"})

ProgramLaw = Callable[[RankStep], Iterator[str]]


def breaches(program: Program) -> tuple[str, ...]:
    """Every breach of a law in the steps of `program`, as "law: program n, phase: breach"."""
    return tuple(
        f"{name}: program {number}, {step.phase}: {breach}"
        for number in range(len(program.ranks))
        for step in rank_steps(program, number)
        for name, law in PROGRAM_LAWS.items()
        for breach in law(step)
    )


def require_lawful(program: Program, *, where: str) -> None:
    """ProgramError with the first breach of a law, if there is any; `where` names the scenario."""
    for breach in breaches(program):
        raise ProgramError(where=where, expected="a Program that obeys every law", found=breach)


def every_op_can_run(step: RankStep) -> Iterator[str]:
    """No ops of several ranks wait for one another in a ring; asked of all ranks at once."""
    for section in (STEPS[step.phase], step.phase) if step.number == 0 else ():
        if ring := deadlock(step.program, section=section):
            yield f"a deadlock: {ring}"


def every_unshard_is_resharded(step: RankStep) -> Iterator[str]:
    """Unsharded parameters are gone when a step ends whose optimizer steps their unit, since the
    next step would read old values. Others may stay for the next step, which reads or frees them.
    Those made in construction may stay unread, as hpZ's copies of frozen parameters.
    """
    trained = {op.unit for op in step.ops if op.kind in REDUCTIONS or op.stream in REDUCTIONS}
    read = {unit for op in step.following for unit in op.reads}
    events = (event for op in step.following for event in op.memory)
    used = {event.buffer for event in events if isinstance(event, Free)}
    for made in unsharded(step.after):
        if made.op.unit in trained:
            yield f"{made}, outlives the step, and its unit is trained"
        elif made.section != "construction" and not (
            made.op.unit in read or made.alloc.buffer in used
        ):
            yield f"{made}, outlives the step, and the next one neither reads nor frees it"


def compute_finds_its_parameters_gathered(step: RankStep) -> Iterator[str]:
    """Compute reads a param group only while as many of its bytes are unsharded as its all-gather
    brought, or some."""
    owners: dict[str, tuple[str, int]] = {}
    live = Counter[str]()
    for made in unsharded(step.before):
        owners[made.alloc.buffer] = (made.op.unit, made.alloc.nbytes)
        live[made.op.unit] += made.alloc.nbytes
    brought: dict[str, int] = {}
    for op in step.ops:
        for unit in op.reads if op.kind in COMPUTE else ():
            if live[unit] < brought.get(unit, 1):
                yield f"op {op.index} ({label(op)}) reads {unit}, which is sharded"
        if op.kind == "all_gather":
            brought[op.unit] = op.nbytes
        for event in op.memory:
            if not isinstance(event, Alloc):
                unit, nbytes = owners.pop(event.buffer, ("", 0))
                live[unit] -= nbytes
            elif event.kind == "unsharded_parameters":
                owners[event.buffer] = (op.unit, event.nbytes)
                live[op.unit] += event.nbytes


def compute_waits_for_its_all_gather(step: RankStep) -> Iterator[str]:
    """Between the all-gather of a param group and compute that reads it lies a chain of waits and
    streams."""
    gathered: dict[str, int] = {}
    for op in step.ops:
        if op.kind == "all_gather":
            gathered[op.unit] = op.index
        for unit in op.reads if op.kind in COMPUTE else ():
            if unit in gathered:
                awaited = step.order.before(gathered[unit], op.index)
            else:
                stream = step.pending.get(unit)
                awaited = stream is None or step.order.awaits(stream, op.index)
            if not awaited:
                gather = f", op {gathered[unit]}" if unit in gathered else " in the step before"
                yield (
                    f"op {op.index} ({label(op)}) does not wait for the all-gather of {unit}"
                    f"{gather}"
                )


def collectives_send_what_is_packed(step: RankStep) -> Iterator[str]:
    """A reduction begins after the copy of its gradients, or the norms that it sends, an all-gather
    after its copy-in."""
    packed: dict[tuple[str, bool], int] = {}
    for op in step.ops:
        gathers = op.stream in GATHER_STREAMS
        if op.kind in ("copy", "optimizer"):
            packed[op.unit, gathers] = op.index
        copy = packed.get((op.unit, gathers), -1) if op.kind in COLLECTIVES else -1
        if copy >= 0 and not step.order.before(copy, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for what op {copy} packs"


def copies_wait_for_what_they_copy(step: RankStep) -> Iterator[str]:
    """A copy-out begins after its all-gather, or all-reduce; what a reduction's stream casts or
    adds was packed on the compute stream."""
    brought: dict[str, int] = {}
    packed: dict[str, int] = {}
    for op in step.ops:
        if op.kind in ("all_gather", "all_reduce"):
            brought[op.unit] = op.index
        if op.kind != "copy" or op.stream in GATHER_STREAMS:
            continue
        source = brought.pop(op.unit, -1) if op.stream == "compute" else packed.get(op.unit, -1)
        if source >= 0 and not step.order.before(source, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for op {source}"
        if op.stream == "compute":
            packed[op.unit] = op.index
        elif op.stream == "callback":  # what was reduced is cast before others have it
            brought[op.unit] = op.index
        else:  # it has become the sharded gradient, and what the unit copies next is packed anew
            brought.pop(op.unit, None)


def sent_buffers_are_freed_afterwards(step: RankStep) -> Iterator[str]:
    """An op that frees a communication buffer waits for the collective (or copy in its stead) it
    was made for, unless it is that.

    Frees on the host promise nothing: there the allocator itself waits for the streams that still
    use the memory.
    """
    waiting: dict[str, str] = {}
    senders: dict[str, int] = {}
    for op in step.ops:
        for event in op.memory:
            if not isinstance(event, Alloc):
                waiting.pop(event.buffer, None)
                sender = senders.pop(event.buffer, -1)
                if sender >= 0 and op.stream != "host" and not step.order.before(sender, op.index):
                    yield (
                        f"op {op.index} ({label(op)}) frees {event.buffer}, which op {sender} may "
                        f"still use"
                    )
            elif event.kind == "communication":
                waiting[event.buffer] = op.unit
        if op.kind in COLLECTIVES or (op.kind == "copy" and op.stream in REDUCTIONS):
            made = [buffer for buffer, unit in waiting.items() if unit == op.unit]
            for buffer in made:
                del waiting[buffer]
                senders[buffer] = op.index


def gathers_overwrite_nothing_that_is_read(step: RankStep) -> Iterator[str]:
    """Memory that a gather stream has freed is allocated again by it only after every read of it
    has ended.

    torch's allocator gives a stream its own freed blocks at once; fully_shard keeps this order by
    events. A free on the compute stream is the record_stream of FSDP1: the block is free once that
    stream has come so far. Compute reads unsharded parameters, a copy what an all-gather has
    brought.
    """
    owners: dict[str, tuple[str, str, Stream]] = {
        buffer: (made.alloc.kind, made.op.unit, made.op.stream)
        for buffer, made in step.before.items()
    }
    readers: dict[tuple[str, str], int] = {}
    gathered: dict[str, int] = {}
    brought: dict[str, str] = {}  # by unit: a unit that runs twice in a row has two of them at once
    reused: dict[Stream, int] = {}
    for op in step.ops:
        readers |= {("unsharded_parameters", unit): op.index for unit in op.reads}
        if op.kind == "copy" and gathered.get(op.unit) in op.waits:
            readers["communication", brought.get(op.unit, "")] = op.index
        if op.kind == "all_gather":
            gathered[op.unit] = op.index
        for event in op.memory:
            if not isinstance(event, Alloc):
                kind, unit, stream = owners.pop(event.buffer, ("", "", op.stream))
                if op.kind == "free" and op.stream == "compute":
                    continue
                read = event.buffer if kind == "communication" else unit
                reused[stream] = max(reused.get(stream, -1), readers.get((kind, read), -1))
                continue
            owners[event.buffer] = (event.kind, op.unit, op.stream)
            if event.kind == "communication" and op.stream in GATHER_STREAMS:
                brought[op.unit] = event.buffer
            reader = reused.get(op.stream, -1) if op.stream in GATHER_STREAMS else -1
            if reader >= 0 and not step.order.before(reader, op.index):
                yield (
                    f"op {op.index} ({label(op)}) does not wait for op {reader}, which may still "
                    f"read what it overwrites"
                )


def reductions_wait_for_gradients(step: RankStep) -> Iterator[str]:
    """A reduction begins when the backward that was issued last before it has ended."""
    backward = -1
    for op in step.ops:
        if op.kind in REDUCTIONS and backward >= 0 and not step.order.before(backward, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for the gradients of op {backward}"
        if op.kind == "backward":
            backward = op.index


def the_optimizer_waits_for_all_gradients(step: RankStep) -> Iterator[str]:
    """The optimizer steps after every backward and every reduction before it."""
    for op in step.ops:
        if op.kind == "optimizer":
            needed = (
                other
                for other in step.ops[: op.index]
                if other.kind in REDUCTIONS or other.kind == "backward"
            )
            yield from (
                f"op {op.index} ({label(op)}) does not wait for op {other.index} ({label(other)})"
                for other in needed
                if not step.order.before(other.index, op.index)
            )


def stepped_parameters_travel_after_the_step(step: RankStep) -> Iterator[str]:
    """A gather or broadcast issued after the optimizer sends what it has stepped."""
    stepped = -1
    for op in step.ops:
        if op.kind in GATHERS and stepped >= 0 and not step.order.before(stepped, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for the optimizer, op {stepped}"
        if op.kind == "optimizer":
            stepped = op.index


def a_steady_step_returns_what_it_takes(step: RankStep) -> Iterator[str]:
    """Memory of each kind, and what is gathered of each unit, has as many bytes when a steady step
    ends as when it began."""
    if step.phase != "steady":
        return
    change = Counter[tuple[str, str]]()
    for live, sign in ((step.after, 1), (step.before, -1)):
        for made in live.values():
            unit = made.op.unit if made.alloc.kind == "unsharded_parameters" else ""
            change[made.alloc.kind, unit] += sign * made.alloc.nbytes
    for (kind, unit), nbytes in change.items():
        if nbytes:
            yield f"{kind}{unit and f' of {unit}'} are {nbytes:+,} B after the step"


def shards_are_equal(step: RankStep) -> Iterator[str]:
    """The bytes of an all-gather, reduce-scatter or all-to-all divide by the size of its group."""
    for op in step.ops:
        if op.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            size = step.program.mesh.size(op.group)
            if op.nbytes % size:
                yield f"op {op.index} ({label(op)}): {op.nbytes:,} B do not divide by {size} ranks"


PROGRAM_LAWS: dict[str, ProgramLaw] = {
    "every op can run": every_op_can_run,
    "every unshard is resharded": every_unshard_is_resharded,
    "compute finds its parameters gathered": compute_finds_its_parameters_gathered,
    "compute waits for its all-gather": compute_waits_for_its_all_gather,
    "collectives send what is packed": collectives_send_what_is_packed,
    "copies wait for what they copy": copies_wait_for_what_they_copy,
    "sent buffers are freed afterwards": sent_buffers_are_freed_afterwards,
    "gathers overwrite nothing that is read": gathers_overwrite_nothing_that_is_read,
    "reductions wait for gradients": reductions_wait_for_gradients,
    "the optimizer waits for all gradients": the_optimizer_waits_for_all_gradients,
    "stepped parameters travel after the step": stepped_parameters_travel_after_the_step,
    "a steady step returns what it takes": a_steady_step_returns_what_it_takes,
    "shards are equal": shards_are_equal,
}
