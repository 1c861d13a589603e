"""The least that fits: every stage and checkpointing on the scenario's cluster, what each needs and
takes, and which to take.

Each candidate is planned and simulated; the recommendation is read off their figures and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from zsim.analysis.advice import REMEDY, Way, together, ways_of
from zsim.analysis.alternatives import (
    assignment,
    can_checkpoint,
    dropped,
    moved,
    offloaded_otherwise,
)
from zsim.analysis.fit.fit_table import Candidate, Fit
from zsim.autograd.traced.model import TracedModel
from zsim.errors import ScenarioError
from zsim.io.units import format_bytes, format_time
from zsim.ir.mesh import Mesh
from zsim.memory.fits import MemoryVerdict
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.runs import fault_support
from zsim.scenario.checks import refusals
from zsim.scenario.checks.work_limits import MANY_TIMES
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES, OptionValue, ladder

MUCH_FASTER = 1.02
"""Ratio of step times up to which the candidate that shards or recomputes less is preferred to a
faster one."""


MOST_STARTS = 6
"""Candidates with the least needed memory that are changed further where nothing fits."""


def fit(scenario: Scenario, *, say: Callable[[str], None] | None = None) -> Fit:
    """Every candidate assessed, with further changes where none of them fits, and a recommendation.
    `say` is told of the progress.

    ArgumentError for a scenario with faults, ScenarioError where so many simulations would take
    minutes.
    """
    fault_support.require_none(scenario, purpose="a choice of strategies")
    if problem := scenario.work.problem(part=MANY_TIMES):
        raise ScenarioError((f"{scenario.name}: too much to simulate for each stage: {problem}",))
    able: list[tuple[str, Scenario]] = []
    refused: list[tuple[str, str]] = []
    for name, other in cases(scenario):
        if problems := refusals.problems(other):
            refused.append((name, problems[0]))
        else:
            able.append((name, other))
    begin = monotonic()

    def counted_down(done: int) -> None:
        left = (monotonic() - begin) / done * (len(able) - done)
        if say:
            say(f"{done} of {len(able)} candidates, {left:,.0f} s left")

    tried = ways_of([((name,), other) for name, other in able], say=counted_down)
    if all(way.memory.verdict != "FITS" for way in tried):
        tried += together(
            sorted(tried, key=lambda way: way.memory.needed.nbytes)[:MOST_STARTS],
            stages=scenario.world_size == 1,
        )
    candidates = tuple(_candidate(scenario, way) for way in tried)
    chosen, reason = recommend(candidates)
    return Fit(
        scenario=scenario, candidates=candidates, recommended=chosen, reason=reason,
        refused=tuple(refused),
    )


def _candidate(scenario: Scenario, way: Way) -> Candidate:
    took = way.step
    assert took is not None
    return Candidate(
        name=way.name, scenario=way.scenario, memory=way.memory, step_time_ns=took.ns,
        step_time_band_ns=took.band_ns,
        dropped=dropped(scenario, way.scenario, way=way.name),
        instead=offloaded_otherwise(scenario, way.scenario),
    )


def ways(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The stages from least to most sharded, each without activation checkpointing, with the
    scenario's own, and with that of every block.

    Each keeps every option of the scenario that its strategy knows. What a scenario file would be
    refused for is left out.
    """
    yield from ((name, case) for name, case in cases(scenario) if not refusals.problems(case))


def cases(
    scenario: Scenario, *, strategies: Sequence[str] = ()
) -> Iterator[tuple[str, Scenario]]:
    """The candidates by name, also those that a scenario file would be refused for, under
    `strategies` or those of the ladder."""
    own = scenario.checkpointing
    forms = {NO_CHECKPOINTING: "", own: f", checkpointing as asked for ({_words(own)})"}
    if can_checkpoint(scenario):
        forms[Checkpointing(mode="full")] = ", checkpointing"
    forms[NO_CHECKPOINTING] = ""
    rungs = strategies or ladder(scenario.strategy, num_ranks=scenario.world_size)
    for name, other in _stages(scenario, rungs):
        yield from (
            (name + suffix, derived(other, checkpointing=form)) for form, suffix in forms.items()
        )


def _words(policy: Checkpointing) -> str:
    """Checkpointing in the terms of a scenario file."""
    kinds = (
        [f"save = {', '.join(policy.save)}"]
        if policy.save
        else [f"recompute = {', '.join(policy.recompute)}"]
        if policy.recompute
        else []
    )
    every = [f"save_every = {policy.save_every}"] if policy.save_every > 1 else []
    return "; ".join(
        [policy.mode, *kinds, *every, *([f"every = {policy.every}"] if policy.every > 1 else [])]
    )


def _stages(scenario: Scenario, rungs: Sequence[str]) -> Iterator[tuple[str, Scenario]]:
    """The strategies of a ladder, each on the meshes that it can have, and the scenario's own
    before the first of its stage there."""
    own = STRATEGIES[scenario.strategy]
    known = set[tuple[str, Mesh | None]]()
    for strategy in rungs:
        kind = STRATEGIES[strategy]
        beside = kind.formula.stage == own.formula.stage and scenario.strategy not in rungs
        for mesh, groups in _meshes(scenario, strategy):
            has_mesh = mesh is None or len(own.axes) > 1
            for name in (scenario.strategy, strategy) if beside and has_mesh else (strategy,):
                if (name, mesh) not in known:
                    known.add((name, mesh))
                    yield from _forms(scenario, name, mesh, groups)


def _forms(
    scenario: Scenario, strategy: str, mesh: Mesh | None, groups: str
) -> Iterator[tuple[str, Scenario]]:
    """The scenario under `strategy` on `mesh`, as it asks, and with units that stay gathered from
    forward to backward or are freed."""
    kind, model = STRATEGIES[strategy], scenario.model
    needs = kind.for_left_out if model.left_out and not isinstance(model, TracedModel) else ()

    def form(*values: OptionValue) -> tuple[str, Scenario]:
        options = {each.option: each.value for each in values}
        name = ", ".join([strategy + groups, *map(assignment, values)])
        return name, moved(scenario, strategy, mesh=mesh, **options)

    name, variant = form(*needs)
    for kept in kind.keeps_gathered:
        if not kept.is_set(variant.options):
            yield form(*needs, kept)
    yield name, variant
    frees = kind.frees_after_forward
    if frees and not any(freed.is_set(variant.options) for freed in frees):
        yield form(*needs, frees[0])


def _meshes(scenario: Scenario, strategy: str) -> Iterator[tuple[Mesh | None, str]]:
    """None for all ranks in one group; for a strategy that keeps replicas, meshes with their name.

    Of one that does both, a node a group and the scenario's own groups stand beside all ranks.
    """
    over_all = STRATEGIES[strategy].over_all_ranks
    for mesh in _replicated(scenario) if over_all else ():
        whole_node = mesh.dp_shard == scenario.cluster.devices_per_node
        groups = "a node a shard group" if whole_node else f"shard groups of {mesh.dp_shard}"
        both = over_all == strategy
        if not both or (mesh.dp_replicate > 1 and (whole_node or mesh == scenario.mesh)):
            yield mesh, f", {groups}"
    if over_all in ("", strategy):
        yield None, ""


def _replicated(scenario: Scenario) -> list[Mesh]:
    """Replicas of shard groups that lie each in one node, from the smallest groups to the largest,
    and the scenario's own."""
    ranks, per_node = scenario.world_size, scenario.cluster.devices_per_node
    sizes = {
        size
        for size in range(2, min(per_node, ranks - 1) + 1)
        if per_node % size == 0 and ranks % size == 0
    }
    sharded = STRATEGIES[scenario.strategy].over_all_ranks
    if sharded and (sharded != scenario.strategy or scenario.mesh.dp_replicate > 1):
        sizes.add(scenario.mesh.dp_shard)
    return [Mesh(dp_replicate=ranks // size, dp_shard=size) for size in sorted(sizes)]


def recommend(candidates: tuple[Candidate, ...]) -> tuple[Candidate | None, str]:
    """The fastest candidate that fits, or one that shards less and is about as fast, with the
    reason. A TIGHT one is recommended only if none fits.

    TIGHT candidates with room for all that they cache come first; those expected to fail come
    last.
    """
    for verdict in ("FITS", "TIGHT"):
        able = [candidate for candidate in candidates if candidate.memory.verdict == verdict]
        if not able:
            continue
        least_trouble = min(trouble(candidate.memory) for candidate in able)
        able = [candidate for candidate in able if trouble(candidate.memory) == least_trouble]
        fastest = min(able, key=lambda candidate: candidate.step_time_ns)
        most_ns = fastest.step_time_ns * MUCH_FASTER
        chosen = next(candidate for candidate in able if candidate.step_time_ns <= most_ns)
        refused = [candidate for candidate in candidates if candidate.memory.verdict == "OOM"]
        able_to = _ABLE[trouble(chosen.memory)] if verdict == "TIGHT" else "fit"
        reason = _times(chosen, fastest, f"{len(able)} (of {len(candidates)}) that {able_to}")
        if refused:
            least = min(refused, key=lambda candidate: candidate.memory.needed.nbytes)
            room = format_bytes(least.memory.needed.nbytes)
            reason += f"; of those that do not fit {least.name} needs least, {room}"
        return chosen, reason
    smallest = min(candidates, key=lambda candidate: candidate.memory.needed.nbytes)
    needed, there = smallest.memory.needed.nbytes, smallest.memory.capacity.nbytes
    short = (
        f"even {smallest.name} needs {format_bytes(needed)} of {format_bytes(there)} (peak in "
        f"{smallest.memory.peak_at})"
    )
    short += f"; {smallest.memory.host}" if smallest.memory.host_is_short else ""
    return None, f"nothing fits: {short}; {REMEDY}"


_ABLE = (
    "may just fit", "run only by giving back what they cache",
    "may run with the least outside torch's bytes",
)


def _times(chosen: Candidate, fastest: Candidate, able: str) -> str:
    """Step times of the chosen candidate and of the fastest of those `able` to run, and the reason
    where these differ."""
    taken, pressed = f"{format_time(chosen.step_time_ns)} a step", chosen.memory.pressure
    if pressed is not None and pressed.runs is not None and pressed.runs.sentence:
        taken += f", {pressed.runs.sentence}"
    if chosen is fastest:
        return f"the fastest of {able}, {taken}"
    return (
        f"one of {able}, {taken}; {fastest.name} is less than {100 * (MUCH_FASTER - 1):.0f} % "
        f"faster ({format_time(fastest.step_time_ns)}) and {more_work(chosen.scenario)}"
    )


def more_work(scenario: Scenario) -> str:
    """Words for what a candidate does that the one before it does not."""
    return f"{'shards' if scenario.world_size > 1 else 'wraps'} or recomputes more"


def trouble(verdict: MemoryVerdict) -> int:
    """The trouble of a TIGHT step, as an index in `_ABLE`.

    0 where the allocator need not release its cache, 2 where the step is expected to fail.
    """
    return 0 if verdict.pressure is None else 1 if verdict.pressure.expected else 2
