"""Monotonicities: the direction in which a figure moves when one choice changes, with the known
exceptions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate import simulate
from zsim.ir.ops import COLLECTIVES, Kernel, Op
from zsim.ir.sharding import padded_size
from zsim.memory import fits
from zsim.memory.waterfall import num_whole
from zsim.models.training_options import DTYPE_NBYTES
from zsim.runs.run import Run
from zsim.scenario.derived import derived
from zsim.scenario.plan import planned
from zsim.testing.laws.variants import (
    costs_of,
    library_of,
    program_of,
    runs_once,
    stage_of,
    step_of,
    strategy_table,
    variant,
)

SHARDED: Mapping[int, tuple[str, ...]] = {
    2: ("gradients", "optimizer_states"), 3: ("parameters", "gradients"),
}
"""Kinds of memory that each stage shards; DeepSpeed's engine has buffers of its own."""
RANKED = {"FITS": 0, "TIGHT": 1, "OOM": 2}
GATHERS, REDUCTIONS = ("all_gather",), ("all_reduce", "reduce_scatter", "all_to_all")


def faster_links_slow_no_step(run: Run) -> Iterator[str]:
    """Twice the bandwidth of every link makes no step slower.

    It is asked without interference and contention: with them a collective over faster links lies
    beside other kernels or collectives, which may lose more (README.md has the exceptions).
    """
    program = program_of(run.scenario)
    slow, fast = (
        simulate(program, costs=costs_of(run.scenario, faster=times), contention=False).step_time_ns
        for times in (1, 2)
    )
    if fast > slow:
        yield f"all ranks: {fast:,} ns with links twice as fast, and {slow:,} ns without"


def twice_the_durations_are_twice_the_step(run: Run) -> Iterator[str]:
    """A step takes exactly twice as long where each op, collective and issue does."""
    program, costs = program_of(run.scenario), costs_of(run.scenario)
    once, twice = (
        simulate(program, costs=each, contention=False).step_time_ns
        for each in (costs, _Doubled(costs))
    )
    if twice != 2 * once:
        yield f"all ranks: {twice:,} ns of twice the durations, and {once:,} ns of once"


@dataclass(frozen=True, slots=True)
class _Doubled:
    """Costs that are twice those of `costs`."""

    costs: Costs

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """Twice the time of the kernels."""
        return 2 * self.costs.compute_ns(kernels)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """Twice the time of the collective."""
        return 2 * self.costs.collective_ns(kind, nbytes, ranks)

    def lost_links(self, ranks: tuple[int, ...]) -> Sequence[str]:
        """The same lost links."""
        return self.costs.lost_links(ranks)

    def usage(self, ranks: tuple[int, ...]) -> Mapping[int, Mapping[str, Fraction]]:
        """The usage of links."""
        return self.costs.usage(ranks)

    def host_usage(
        self, kernels: tuple[Kernel, ...], rank: int, *, in_step: bool
    ) -> Mapping[Hashable, Fraction]:
        """The shares of the node."""
        return self.costs.host_usage(kernels, rank, in_step=in_step)

    def issue_ns(self, op: Op) -> int:
        """Twice the time of the host."""
        return 2 * self.costs.issue_ns(op)

    @property
    def launch_queue(self) -> int:
        """The same launch queue."""
        return self.costs.launch_queue

    @property
    def node_size(self) -> int:
        """The same nodes."""
        return self.costs.node_size


def more_ranks_hold_no_more(run: Run) -> Iterator[str]:
    """Ranks hold no more of what is sharded where there are twice as many to shard over.

    Whole parameters of ZeRO-1 and ZeRO-2, and those of ZeRO-3 that stay whole, are the exception.
    They lie in buffers that are padded to the ranks, and may grow by less than an element of each
    buffer and rank.
    """
    scenario = run.scenario
    shards, has_engine = 2 * scenario.mesh.dp_shard, library_of(scenario) == "deepspeed"
    kinds = () if has_engine else SHARDED.get(stage_of(scenario), ())
    if num_whole(scenario):
        kinds = tuple(kind for kind in kinds if kind != "parameters")
    ranks = 2 * scenario.world_size
    table = strategy_table(scenario, dp_shard=shards)
    if isinstance(table.get("reshard_after_forward"), int):
        table["reshard_after_forward"] = bool(table["reshard_after_forward"])
    wider = variant(scenario, cluster={"ranks": ranks}, strategy=table) if kinds else None
    if wider is None or wider.mesh.dp_shard != shards:
        return
    narrow, wide = step_of(scenario), step_of(wider)
    for kind in kinds:
        before, after = narrow.most(kind), wide.most(kind)
        if after > before:
            yield f"all ranks: {after:,} B of {kind} on {shards} shards, and {before:,} B on half"


def more_lookahead_holds_no_less(run: Run) -> Iterator[str]:
    """ZeRO-3 with one unit more of lookahead gathers the same bytes, and its peak is no lower.

    Its step may be slower: a gather that is issued earlier holds up a reduction behind it.
    """
    scenario = run.scenario
    if (library_of(scenario), stage_of(scenario)) != ("zsim", 3):
        return
    ahead = scenario.options.lookahead + 1
    longer = variant(scenario, strategy=strategy_table(scenario, lookahead=ahead))
    if longer is None:
        return
    before, after = step_of(scenario), step_of(longer)
    yield from _no_less(after.peak, before.peak, "at the peak", f"a lookahead of {ahead}")
    ours, theirs = before.payload(*GATHERS), after.payload(*GATHERS)
    if ours != theirs:
        yield f"rank 0: {theirs:,} B gathered with a lookahead of {ahead}, and {ours:,} B with less"


def thresholds_send_no_more_and_hold_no_less(run: Run) -> Iterator[str]:
    """ZeRO-3 with parameters that stay whole sends no more bytes than with none, and holds no fewer
    of parameters between steps.

    Padding is the exception: a unit in two buffers may have an element more for each rank and
    collective. The peak may be lower, as gathered parameters lie beside their shards.
    """
    scenario = run.scenario
    if not num_whole(scenario):
        return
    none = variant(
        scenario,
        strategy=strategy_table(scenario, persistence_threshold=0, zero2_threshold=0),
    )
    assert none is not None
    sharded, hybrid = step_of(none), step_of(scenario)
    padding = 4 * scenario.mesh.dp_shard * len(hybrid.collectives)
    sent = sharded.payload(*COLLECTIVES) + padding, hybrid.payload(*COLLECTIVES)
    yield from _no_less(*sent, "sent and padded", "all parameters sharded")
    before, after = (
        min(memory.held["parameters"] for memory in step.memory) for step in (sharded, hybrid)
    )
    yield from _no_less(after, before, "of parameters held", "some of them whole")


def larger_micro_batches_hold_no_less(run: Run) -> Iterator[str]:
    """A micro-batch of one sequence more has no lower peak.

    Its step may be faster: products of sizes that divide by more take less on GPUs.
    """
    larger = variant(run.scenario, batch={"micro_batch": run.scenario.batch.micro_batch + 1})
    if larger is not None:
        peaks = step_of(larger).peak, step_of(run.scenario).peak
        yield from _no_less(*peaks, "at the peak", "a larger micro-batch")


def resharding_sends_no_less_and_holds_no_more(run: Run) -> Iterator[str]:
    """Resharding after forward gathers no fewer bytes than keeping parameters gathered does, and
    has no higher peak.

    The buffers of a gather in backward are the exception, since what stays gathered needs none.
    """
    scenario = run.scenario
    if library_of(scenario) != "fully_shard":
        return
    kept, resharded = (
        variant(scenario, strategy=strategy_table(scenario, reshard_after_forward=again))
        for again in (False, True)
    )
    if kept is None or resharded is None:
        return
    keeps, again = step_of(kept), step_of(resharded)
    yield from _no_less(again.payload(*GATHERS), keeps.payload(*GATHERS), "gathered", "resharding")
    buffers = max(memory.by_kind["communication"] for memory in again.memory)
    yield from _no_less(
        keeps.peak + buffers, again.peak, "at the peak and in its buffers", "all gathered"
    )


def recomputing_holds_no_more(run: Run) -> Iterator[str]:
    """Activation checkpointing of every block holds no more when backward begins than none does.

    The peak in backward may be higher: beside the activations of the recomputed block lie inputs
    that its own backward would not have kept. The exception is DeepSpeed's stage 3: its trace of
    modules decides on gathers ahead, and recomputed blocks are in it twice. So it may hold other
    gathered parameters and buffers of gathers, at most two of each.
    """
    scenario = run.scenario
    if scenario.checkpointing.mode == "full":
        return
    plain, again = (
        variant(scenario, activation_checkpointing=table) for table in (None, {"mode": "full"})
    )
    if plain is None or again is None:
        return
    ahead = 0
    if (library_of(scenario), stage_of(scenario)) == ("deepspeed", 3):
        ahead = 2 * DTYPE_NBYTES[scenario.precision.parameters] * sum(
            padded_size(parameter.numel, scenario.mesh.dp_shard)
            for parameter in scenario.model.parameters
        )
    held = step_of(plain).before_backward + ahead, step_of(again).before_backward
    yield from _no_less(*held, "before backward", "activations kept")


def more_memory_is_never_too_little(run: Run) -> Iterator[str]:
    """A device of twice the memory needs no more beyond it: no FITS turns into OOM."""
    cluster = run.scenario.cluster
    if cluster.kind != "cuda":
        return
    device = replace(cluster.device, memory=2 * cluster.device.memory)
    larger = derived(run.scenario, cluster=replace(cluster, device=device))
    before, after = (fits.assess(planned(each)) for each in (run.scenario, larger))
    if RANKED[after.verdict] > RANKED[before.verdict]:
        yield f"all ranks: {before.verdict} becomes {after.verdict} with twice the memory"


def fewer_reductions_send_no_more(run: Run) -> Iterator[str]:
    """Reducing gradients after the last micro-batch alone sends no more bytes of them than after
    every one.

    A block that runs twice before a backward is the exception in fully_shard: it may be reduced
    after each run.
    """
    scenario = run.scenario
    twice = library_of(scenario) == "fully_shard" and not runs_once(scenario)
    if scenario.batch.accumulation == 1 or twice:
        return
    every, last = (
        variant(scenario, strategy=strategy_table(scenario, sync=sync))
        for sync in ("every", "last")
    )
    if every is not None and last is not None:
        often, once = (step_of(each).payload(*REDUCTIONS) for each in (every, last))
        yield from _no_less(often, once, "reduced", "every micro-batch")


def _no_less(nbytes: int, than: int, at: str, option: str) -> Iterator[str]:
    if nbytes < than:
        yield f"all ranks: {nbytes:,} B {at} with {option}, and {than:,} B without"
