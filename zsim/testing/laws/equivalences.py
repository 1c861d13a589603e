"""Equivalences: two scenarios that must give one Program, the same bytes or the same times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from zsim.errors import ProgramError
from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.ops import COLLECTIVES, Alloc
from zsim.ir.program import PHASES, Program, RankProgram
from zsim.runs.run import Run
from zsim.runs.simulated_ranks import MOST_TIMELINES
from zsim.scenario.scenario import Scenario
from zsim.strategies.zero3 import MAX_LOOKAHEAD, MOST_ELEMENTS
from zsim.testing.laws.variants import (
    library_of,
    program_of,
    runs_once,
    simulated,
    stage_of,
    step_of,
    strategy_table,
    variant,
)


def programs_obey_their_laws(run: Run) -> Iterator[str]:
    """The Program of the scenario is valid and obeys the laws of `zsim.ir.laws.program_laws`."""
    program = program_of(run.scenario)
    try:
        validate(program)
    except ProgramError as error:
        yield str(error)
        return
    yield from program_laws.breaches(program)


def folding_changes_nothing(run: Run) -> Iterator[str]:
    """Simulating one rank of those that are alike gives what simulating each of up to 64 does."""
    if run.world_size > MOST_TIMELINES:  # each of them would take long
        return
    if run.scenario.execution.detail == "steps":  # which are never folded
        return
    folded, whole = (simulated(run.scenario, all_ranks=every) for every in (False, True))
    if folded.step_time_ns != whole.step_time_ns:
        yield (
            f"all ranks: a step of {folded.step_time_ns} ns, and of {whole.step_time_ns} ns where "
            "all are simulated"
        )
    shown = {rank.rank: rank for rank in folded.ranks}
    for rank, like in zip(whole.ranks, folded.representatives, strict=True):
        other = shown[like]
        if replace(other, rank=rank.rank, stands_for=1, bytes_sent=rank.bytes_sent) != rank:
            yield f"rank {rank.rank}: simulated for itself it is not like rank {like}"
        if rank.bytes_sent > other.bytes_sent:
            yield (
                f"rank {rank.rank}: sends {rank.bytes_sent:,} B, more than rank {like}, which "
                f"stands for it with {other.bytes_sent:,} B"
            )


def ddp_of_one_rank_adds_buckets_alone(run: Run) -> Iterator[str]:
    """A plain module allocates and frees what it does under DDP on one rank, but for what
    communicates: buckets, and copies of what is broadcast."""
    scenario = run.scenario
    if library_of(scenario) != "torch":
        return
    wrapped = variant(scenario, strategy={"name": "ddp"})
    if wrapped is None:  # DDP waits for gradients of blocks that never run
        return
    plain, replicated = (program_of(each).ranks[0] for each in (scenario, wrapped))
    for phase in ("construction", "first", "steady"):
        ours, theirs = (
            [event for op in rank.phase(phase) for event in op.memory if event.buffer not in apart]
            for rank, apart in ((plain, ()), (replicated, _communicated(replicated)))
        )
        pairs = zip_longest(ours, theirs)
        if first := next((pair for pair in pairs if pair[0] != pair[1]), None):
            yield f"rank 0: {first[0]} in a plain module's {phase}, and {first[1]} under DDP"


def _communicated(rank: RankProgram) -> frozenset[str]:
    """Buffers of the kind communication."""
    events = (event for phase in PHASES for op in rank.phase(phase) for event in op.memory)
    return frozenset(
        event.buffer for event in events
        if isinstance(event, Alloc) and event.kind == "communication"
    )


def hsdp_of_one_replica_is_fsdp2(run: Run) -> Iterator[str]:
    """HSDP on a mesh of 1 × N has the Program of FSDP2 on N ranks."""
    scenario = run.scenario
    if library_of(scenario) != "fully_shard":
        return
    ranks = scenario.world_size
    plain = strategy_table(
        scenario, name="fsdp2", dp_replicate=None, dp_shard=ranks, all_reduce=None
    )
    reshards = plain.get("reshard_after_forward")
    if isinstance(reshards, int):  # of another number of ranks; to one rank is not at all
        plain["reshard_after_forward"] = reshards is True or reshards > 1
    hybrid = {**plain, "name": "hsdp", "dp_replicate": 1}
    pair = [variant(scenario, strategy=table) for table in (plain, hybrid)]
    if pair[0] is not None and pair[1] is not None:
        yield from _differs(pair[0], pair[1], "HSDP of 1 × N", "FSDP2 on N ranks")


def hsdp_without_shards_reduces_as_ddp(run: Run) -> Iterator[str]:
    """HSDP on a mesh of N × 1 all-reduces as many bytes of gradients as DDP on N ranks.

    Both must reduce in the dtype of the parameters.

    A block that runs twice before a backward is the exception: fully_shard may reduce it after each
    run, and DDP does once.
    """
    scenario = run.scenario
    if library_of(scenario) not in ("fully_shard", "ddp") or run.world_size == 1:
        return
    same_dtype = scenario.precision.reduce == scenario.precision.parameters
    if not (same_dtype and runs_once(scenario)):
        return
    sync = {"sync": scenario.sync}
    hybrid = variant(scenario, strategy={
        "name": "hsdp", "dp_replicate": scenario.world_size, "dp_shard": 1, "all_reduce": "every",
        **sync,
    })
    replicated = variant(scenario, strategy={"name": "ddp", **sync}, wrapping=None)
    if hybrid is not None and replicated is not None:
        ours, theirs = (step_of(each).payload("all_reduce") for each in (hybrid, replicated))
        if ours != theirs:
            yield f"all ranks: {ours:,} B all-reduced by HSDP of N × 1, and {theirs:,} B by DDP"


def zero_of_one_replica_is_flat(run: Run) -> Iterator[str]:
    """ZeRO on a mesh of 1 × N has the Program of ZeRO over all N ranks."""
    scenario = run.scenario
    if library_of(scenario) != "zsim":
        return
    flat = variant(scenario, strategy={"dp_replicate": None, "dp_shard": None})
    meshed = variant(scenario, strategy={"dp_replicate": 1, "dp_shard": scenario.world_size})
    if flat is not None and meshed is not None:
        yield from _differs(flat, meshed, "ZeRO over all ranks", "ZeRO of 1 × N")


def zero_without_shards_reduces_as_ddp(run: Run) -> Iterator[str]:
    """ZeRO on a mesh of N × 1 all-reduces as many bytes of gradients as DDP that synchronises once
    a step, and sends nothing else."""
    scenario = run.scenario
    if library_of(scenario) not in ("zsim", "ddp") or run.world_size == 1:
        return
    shards_nothing = variant(scenario, strategy={
        "name": scenario.strategy if library_of(scenario) == "zsim" else "zero1",
        "dp_replicate": scenario.world_size, "dp_shard": 1, "sync": scenario.sync,
    })
    replicated = variant(scenario, strategy={"name": "ddp", "sync": "last"}, wrapping=None)
    if shards_nothing is not None and replicated is not None:
        ours = step_of(shards_nothing).payload(*COLLECTIVES)
        theirs = step_of(replicated).payload("all_reduce")
        if ours != theirs:
            yield f"all ranks: {ours:,} B sent by ZeRO of N × 1, and {theirs:,} B by DDP"


def endless_lookahead_gathers_all(run: Run) -> Iterator[str]:
    """ZeRO-3 with the longest lookahead gathers all units before the first forward. A shorter one
    that reaches over all units has the same Program."""
    scenario = run.scenario
    own, stage = library_of(scenario) == "zsim", stage_of(scenario)
    if not own or stage != 3 or scenario.world_size == 1:
        return
    endless = variant(scenario, strategy=strategy_table(scenario, lookahead=MAX_LOOKAHEAD))
    if endless is None or len(endless.model.modules) * endless.batch.forwards >= MAX_LOOKAHEAD:
        return
    less = variant(scenario, strategy=strategy_table(scenario, lookahead=MAX_LOOKAHEAD - 1))
    assert less is not None
    yield from _differs(less, endless, "a lookahead of all units", "a longer one")
    program = program_of(endless)
    for number, rank in enumerate(program.ranks):
        first = next(op.index for op in rank.steady if op.kind == "forward")
        gathered = Counter(op.unit for op in rank.steady[:first] if op.kind == "all_gather")
        read = {unit for op in rank.steady if op.kind == "forward" for unit in op.reads}
        for unit in sorted(read - gathered.keys()):
            yield f"program {number}: {unit} is not gathered before the first forward, op {first}"


def zero2_sends_what_zero1_does(run: Run) -> Iterator[str]:
    """ZeRO-2 and ZeRO-1 by reduce-scatter send the same collectives: only memory differs."""
    scenario = run.scenario
    if library_of(scenario) != "zsim" or stage_of(scenario) == 3:
        return
    cut = {
        key: value for key, value in scenario.tables["strategy"].items()
        if key in ("granularity", "sync", "dp_replicate", "dp_shard")
    }
    pair = [
        variant(scenario, strategy={"name": "zero1", "form": "reduce_scatter", **cut}),
        variant(scenario, strategy={"name": "zero2", **cut}),
    ]
    sent = [Counter(step_of(each).collectives) for each in filter(None, pair)]
    if len(sent) == 2 and sent[0] != sent[1]:
        (op, nbytes), *_ = (sent[0] - sent[1]) + (sent[1] - sent[0])
        key = op, nbytes
        yield f"rank 0: {sent[0][key]} × {op} of {nbytes:,} B by ZeRO-1, {sent[1][key]} by ZeRO-2"


def zero3_that_stays_whole_is_zero2(run: Run) -> Iterator[str]:
    """ZeRO-3 of which every parameter stays whole has the Program of ZeRO-2."""
    scenario = run.scenario
    if library_of(scenario) != "zsim" or stage_of(scenario) == 1:
        return
    cut = strategy_table(
        scenario, lookahead=None, persistence_threshold=None, zero2_threshold=None
    )
    pair = [
        variant(
            scenario, strategy={**cut, "name": "zero3", "persistence_threshold": MOST_ELEMENTS}
        ),
        variant(scenario, strategy={**cut, "name": "zero2"}),
    ]
    if pair[0] is not None and pair[1] is not None:
        yield from _differs(pair[0], pair[1], "ZeRO-3 of whole parameters", "ZeRO-2")


def _differs(left: Scenario, right: Scenario, name: str, than: str) -> Iterator[str]:
    programs = program_of(left), program_of(right)
    if programs[0] != programs[1]:
        yield f"{name} and {than} have other Programs: {_first(*programs)}"


def _first(left: Program, right: Program) -> str:
    pairs = zip(str(left).splitlines(), str(right).splitlines(), strict=False)
    return next((f"{ours} | {theirs}" for ours, theirs in pairs if ours != theirs), "one is longer")
