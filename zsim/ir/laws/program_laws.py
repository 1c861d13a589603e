"""Laws that every correct Program obeys, whatever the strategy and the model.

A law is a function that yields its breaches as text. The command `zsim validate` asks all of them
before it starts anything real. The command `zsim run` does not, since they cost as much time as
planning. Well-formed ops, buffers and meetings are required of each Program by
`zsim.ir.laws.validate`. Runs have their laws in `zsim.ir.laws.run_laws`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zsim.errors import ProgramError
from zsim.ir.ledger import Ledger, label
from zsim.ir.ops import COLLECTIVES, Alloc, Op, Stream
from zsim.ir.order.deadlock import deadlock
from zsim.ir.order.happens_before import happened
from zsim.ir.program import PhaseName, Program, RankProgram, Stretch

STEPS: dict[PhaseName, tuple[Stretch, ...]] = {
    "first": ("construction", "first"), "steady": ("second", "steady")
}
"""The steps that laws are asked of, each with what leads to it."""
COMPUTE = frozenset({"forward", "backward", "recompute"})
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
GATHERS = frozenset({"all_gather", "broadcast"})
REDUCTION_STREAMS = frozenset({"reduce_scatter", "all_reduce"})
GATHER_STREAMS = frozenset({"all_gather", "all_gather_copy_in"})

ProgramLaw = Callable[[Program, RankProgram, PhaseName], Iterator[str]]


def breaches(program: Program) -> tuple[str, ...]:
    """Every breach of a law in the steps of `program`, as "law: program n, phase: breach"."""
    return tuple(
        f"{name}: program {number}, {phase}: {breach}"
        for name, law in PROGRAM_LAWS.items()
        for number, rank in enumerate(program.ranks)
        for phase in STEPS
        for breach in law(program, rank, phase)
    )


def require_lawful(program: Program, *, where: str) -> None:
    """ProgramError with the first breach of a law, if there is any; `where` names the scenario."""
    for breach in breaches(program):
        raise ProgramError(where=where, expected="a Program that obeys every law", found=breach)


def every_op_can_run(program: Program, rank: RankProgram, phase: PhaseName) -> Iterator[str]:
    """No ops of several ranks wait for one another in a ring; asked of all ranks at once."""
    for stretch in STEPS[phase] if rank is program.ranks[0] else ():
        if ring := deadlock(program, stretch=stretch):
            yield f"a deadlock: {ring}"


def every_unshard_is_resharded(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """Unsharded parameters that a step makes are gone at its end, but for what a unit whose
    backward never runs keeps on fewer ranks.

    fully_shard frees those parts when the unit is resharded again, in the next step's forward.
    """
    live: dict[str, Op] = {}
    ended = {op.unit for op in rank.phase(phase) if op.kind == "backward"}
    narrowing = set[int]()
    for op in rank.phase(phase):
        for event in op.memory:
            if not isinstance(event, Alloc):
                if live.pop(event.buffer, op) is not op and op.kind == "copy":
                    narrowing.add(op.index)
            elif event.kind == "unsharded_parameters":
                live[event.buffer] = op
    for buffer, op in live.items():
        if op.unit in ended or op.index not in narrowing:
            yield f"{buffer}, made by op {op.index} ({label(op)}), outlives the step"


def compute_finds_its_parameters_gathered(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """Compute reads a param group only while as many of its bytes are unsharded as its all-gather
    brought, or some."""
    owners: dict[str, tuple[str, int]] = {}
    live: dict[str, int] = {}
    brought: dict[str, int] = {}
    for op in rank.phase(phase):
        for unit in op.reads if op.kind in COMPUTE else ():
            if live.get(unit, 0) < brought.get(unit, 1):
                yield f"op {op.index} ({label(op)}) reads {unit}, which is sharded"
        if op.kind == "all_gather":
            brought[op.unit] = op.nbytes
        for event in op.memory:
            if not isinstance(event, Alloc):
                unit, nbytes = owners.pop(event.buffer, ("", 0))
                live[unit] = live.get(unit, 0) - nbytes
            elif event.kind == "unsharded_parameters":
                owners[event.buffer] = (op.unit, event.nbytes)
                live[op.unit] = live.get(op.unit, 0) + event.nbytes


def compute_waits_for_its_all_gather(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """Between the all-gather of a param group and compute that reads it lies a chain of waits and
    streams."""
    order = happened(rank.phase(phase))
    gathered: dict[str, int] = {}
    for op in rank.phase(phase):
        if op.kind == "all_gather":
            gathered[op.unit] = op.index
        for unit in op.reads if op.kind in COMPUTE else ():
            if unit in gathered and not order.before(gathered[unit], op.index):
                yield (
                    f"op {op.index} ({label(op)}) does not wait for the all-gather of {unit}, op "
                    f"{gathered[unit]}"
                )


def collectives_send_what_is_packed(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """A reduction begins after the copy of its gradients, an all-gather after its copy-in."""
    order = happened(rank.phase(phase))
    packed: dict[tuple[str, bool], int] = {}
    for op in rank.phase(phase):
        gathers = op.stream in GATHER_STREAMS
        if op.kind == "copy":
            packed[op.unit, gathers] = op.index
        copy = packed.get((op.unit, gathers), -1) if op.kind in COLLECTIVES else -1
        if copy >= 0 and not order.before(copy, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for the copy in op {copy}"


def copies_wait_for_what_they_copy(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """A copy-out begins after its all-gather, or all-reduce; what a reduction's stream casts or
    adds was packed on the compute stream."""
    order = happened(rank.phase(phase))
    brought: dict[str, int] = {}
    packed: dict[str, int] = {}
    for op in rank.phase(phase):
        if op.kind in ("all_gather", "all_reduce"):
            brought[op.unit] = op.index
        if op.kind != "copy" or op.stream in GATHER_STREAMS:
            continue
        source = brought.pop(op.unit, -1) if op.stream == "compute" else packed.get(op.unit, -1)
        if source >= 0 and not order.before(source, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for op {source}"
        if op.stream == "compute":
            packed[op.unit] = op.index
        elif op.stream == "callback":  # what was reduced is cast before others have it
            brought[op.unit] = op.index
        else:  # it has become the sharded gradient, and what the unit copies next is packed anew
            brought.pop(op.unit, None)


def what_is_sent_is_freed_afterwards(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """An op that frees a communication buffer waits for the collective (or copy in its stead) it
    was made for, unless it is that.

    Frees on the host promise nothing: there the allocator itself waits for the streams that still
    use the memory.
    """
    order = happened(rank.phase(phase))
    waiting: dict[str, str] = {}
    senders: dict[str, int] = {}
    for op in rank.phase(phase):
        for event in op.memory:
            if not isinstance(event, Alloc):
                waiting.pop(event.buffer, None)
                sender = senders.pop(event.buffer, -1)
                if sender >= 0 and op.stream != "host" and not order.before(sender, op.index):
                    yield (
                        f"op {op.index} ({label(op)}) frees {event.buffer}, which op {sender} may "
                        f"still use"
                    )
            elif event.kind == "communication":
                waiting[event.buffer] = op.unit
        if op.kind in COLLECTIVES or (op.kind == "copy" and op.stream in REDUCTION_STREAMS):
            made = [buffer for buffer, unit in waiting.items() if unit == op.unit]
            for buffer in made:
                del waiting[buffer]
                senders[buffer] = op.index


def gathers_overwrite_nothing_that_is_read(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """Memory that a gather stream has freed is allocated again by it only after every read of it
    has ended.

    torch's allocator gives a stream its own freed blocks at once; fully_shard keeps this order by
    events. A free on the compute stream is the record_stream of FSDP1: the block is free once that
    stream has come so far. Compute reads unsharded parameters, a copy what an all-gather has
    brought.
    """
    order = happened(rank.phase(phase))
    owners: dict[str, tuple[str, str, Stream]] = {}
    readers: dict[tuple[str, str], int] = {}
    gathered: dict[str, int] = {}
    brought: dict[str, str] = {}  # by unit: a unit that runs twice in a row has two of them at once
    reused: dict[Stream, int] = {}
    for op in rank.phase(phase):
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
            if reader >= 0 and not order.before(reader, op.index):
                yield (
                    f"op {op.index} ({label(op)}) does not wait for op {reader}, which may still "
                    f"read what it overwrites"
                )


def reductions_wait_for_gradients(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """A reduction begins when the backward that was issued last before it has ended."""
    order, backward = happened(rank.phase(phase)), -1
    for op in rank.phase(phase):
        if op.kind in REDUCTIONS and backward >= 0 and not order.before(backward, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for the gradients of op {backward}"
        if op.kind == "backward":
            backward = op.index


def the_optimizer_waits_for_all_gradients(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """The optimizer steps after every backward and every reduction before it."""
    ops = rank.phase(phase)
    order = happened(ops)
    for op in ops:
        if op.kind == "optimizer":
            needed = (
                other
                for other in ops[: op.index]
                if other.kind in REDUCTIONS or other.kind == "backward"
            )
            yield from (
                f"op {op.index} ({label(op)}) does not wait for op {other.index} ({label(other)})"
                for other in needed
                if not order.before(other.index, op.index)
            )


def stepped_parameters_travel_after_the_step(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """A gather or broadcast issued after the optimizer sends what it has stepped."""
    order, stepped = happened(rank.phase(phase)), -1
    for op in rank.phase(phase):
        if op.kind in GATHERS and stepped >= 0 and not order.before(stepped, op.index):
            yield f"op {op.index} ({label(op)}) does not wait for the optimizer, op {stepped}"
        if op.kind == "optimizer":
            stepped = op.index


def a_steady_step_returns_what_it_takes(
    program: Program, rank: RankProgram, phase: PhaseName
) -> Iterator[str]:
    """Memory of each kind has the same bytes at the end of a steady step as at its beginning."""
    if phase != "steady":
        return
    ledger = Ledger()
    for op in (*rank.construction, *rank.first, *rank.second):
        ledger.apply(op)
    before = dict(ledger.by_kind)
    for op in rank.steady:
        ledger.apply(op)
    for kind, nbytes in ledger.by_kind.items():
        if nbytes != before[kind]:
            yield f"{kind} are {nbytes - before[kind]:+,} B after the step"


def shards_are_equal(program: Program, rank: RankProgram, phase: PhaseName) -> Iterator[str]:
    """The bytes of an all-gather or reduce-scatter divide by the size of its group."""
    for op in rank.phase(phase):
        if op.kind in ("all_gather", "reduce_scatter") and op.nbytes % program.mesh.size(op.group):
            yield (
                f"op {op.index} ({label(op)}): {op.nbytes:,} B do not divide by "
                f"{program.mesh.size(op.group)} ranks"
            )


PROGRAM_LAWS: dict[str, ProgramLaw] = {
    "every op can run": every_op_can_run,
    "every unshard is resharded": every_unshard_is_resharded,
    "compute finds its parameters gathered": compute_finds_its_parameters_gathered,
    "compute waits for its all-gather": compute_waits_for_its_all_gather,
    "collectives send what is packed": collectives_send_what_is_packed,
    "copies wait for what they copy": copies_wait_for_what_they_copy,
    "what is sent is freed afterwards": what_is_sent_is_freed_afterwards,
    "gathers overwrite nothing that is read": gathers_overwrite_nothing_that_is_read,
    "reductions wait for gradients": reductions_wait_for_gradients,
    "the optimizer waits for all gradients": the_optimizer_waits_for_all_gradients,
    "stepped parameters travel after the step": stepped_parameters_travel_after_the_step,
    "a steady step returns what it takes": a_steady_step_returns_what_it_takes,
    "shards are equal": shards_are_equal,
}
