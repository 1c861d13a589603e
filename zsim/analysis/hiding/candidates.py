"""Changes that may hide communication or shorten it: the candidates of each kind, the smallest
first, each a scenario of its own.

None of them is simulated here. What no scenario can be (a micro-batch that a trace does not have,
units that a strategy does not wrap) is not among them; what a strategy refuses is found where it is
planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import combinations

from zsim.analysis.alternatives import assignment
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.links import Link
from zsim.models import wrapping
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES, wrapped

LOOKAHEADS = (1, 2, 3, 4)
FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0)
BUCKETS = (1, 5, 10, 25, 50, 100)
BLOCKS = (1, 2, 3, 4, 6, 8)
BATCHES = (2, 4, 8, 16, 32, 64)


def _lookaheads(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """More units gathered ahead, where the strategy has such options: by number, or by one, two
    and all of their words."""
    options, strategy = scenario.options, STRATEGIES[scenario.strategy]
    depths = strategy.prefetch_depths
    least = max((getattr(options, name) for name in depths), default=0)
    for ahead in LOOKAHEADS if depths else ():
        if ahead > least:
            deeper = replace(options, **dict.fromkeys(depths, ahead))
            text = " and ".join(f"{name} = {ahead}" for name in depths)
            yield text, derived(scenario, options=deeper)
    unset = [value for value in strategy.gathers_earlier if not value.is_set(options)]
    for count in range(1, len(unset) + 1):
        for values in combinations(unset, count):
            earlier = reduce(lambda before, value: value.set_in(before), values, options)
            yield " and ".join(map(assignment, values)), derived(scenario, options=earlier)


def _units(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Several blocks in a param group instead of one, and one instead of several; other buckets
    where gradients have those."""
    model = scenario.model
    if name := STRATEGIES[scenario.strategy].bucket_cap:
        for cap in BUCKETS:
            if cap != getattr(scenario.options, name):
                capped = replace(scenario.options, **{name: float(cap)})
                yield f"{name} = {cap}", derived(scenario, options=capped)
    for every in BLOCKS if len(model.blocks) > 1 else ():
        yield from _wrapped(
            scenario, replace(scenario.wrapping, every=every), f"wrapping.every = {every}"
        )


def _apart(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The embedding a group of its own, so that the step begins and ends with less than the root
    has."""
    yield from _wrapped(
        scenario, replace(scenario.wrapping, ends="apart"), 'wrapping.ends = "apart"'
    )


def _wrapped(
    scenario: Scenario, policy: wrapping.Wrapping, label: str
) -> Iterator[tuple[str, Scenario]]:
    """The scenario with other units, if its are not what the trace has, or nothing to the strategy.
    """
    model = scenario.model
    if (
        policy == scenario.wrapping
        or model.family == wrapping.TRACED
        or STRATEGIES[scenario.strategy].nests in ("nothing", "modules")
    ):
        return
    if not tuple(wrapping.problems(policy, model)):
        yield (
            label,
            derived(scenario, wrapping=policy, model=wrapped(scenario.strategy, model, policy)),
        )


def batch_sizes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Multiples of the micro-batch."""
    for times in BATCHES:
        yield with_batch(scenario, scenario.batch.micro_batch * times)


def with_batch(scenario: Scenario, size: int) -> tuple[str, Scenario]:
    """Label of a micro-batch of `size` sequences, and the scenario with it."""
    return f"micro_batch = {size}", derived(scenario,
        batch=replace(scenario.batch, micro_batch=size)
    )


def _repaired(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The scenario without slow links, where its cluster has some."""
    if scenario.cluster.slow_rails:
        yield (
            "slow_link repaired",
            derived(scenario, cluster=replace(scenario.cluster, slow_rails=())),
        )


def _links(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Links between devices and between nodes of more bandwidth; their latency, and what a
    collective costs besides, stay."""
    for factor in FACTORS:
        yield (
            f"links {factor:g} times as fast",
            derived(scenario, cluster=_faster(scenario.cluster, factor)),
        )


def _faster(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    def times(link: Link) -> Link:
        return replace(link, bandwidth=round(link.bandwidth * factor))

    links = replace(
        cluster.links, fabric=times(cluster.links.fabric), pcie=times(cluster.links.pcie),
        rail=times(cluster.links.rail),
    )
    slow = tuple(
        replace(rail, bandwidth=round(rail.bandwidth * factor)) for rail in cluster.slow_rails
    )
    return replace(cluster, links=links, slow_rails=slow)


BATCH, UNITS, APART = "a larger micro-batch", "other units", "the embedding and the head apart"
KINDS: dict[str, Callable[[Scenario], Iterator[tuple[str, Scenario]]]] = {
    "gathering earlier": _lookaheads,
    UNITS: _units,
    APART: _apart,
    BATCH: batch_sizes,
    "repaired links": _repaired,
    "faster links": _links,
}
"""The kinds of change and their candidates, the smallest first."""
ENDS = (UNITS, APART, "repaired links", "faster links")
"""Changes that make the step's ends shorter."""
