"""Candidates of a plan: the scenario on each number of nodes, with each micro-batch and each value
of other keys, at one global batch. Each has every strategy and checkpointing that `zsim fit`
compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import lcm
from typing import Any

from zsim.analysis.alternatives import dropped, moved, offloaded_otherwise
from zsim.analysis.fit import fit
from zsim.analysis.sweep.axes import Axes, axes_of, changes_of
from zsim.errors import ArgumentError, ScenarioError
from zsim.io.units import counted
from zsim.scenario.checks import refusals
from zsim.scenario.scenario import Scenario
from zsim.scenario.tables import in_line
from zsim.strategies import STRATEGIES

STRATEGY = "strategy.name"
"""The key whose values replace the strategies that `zsim fit` compares."""
SIZES = ("batch", "batch.micro_batch", "batch.accumulation", "cluster.nodes", "cluster.ranks")
"""Keys that have arguments of their own, or follow from these."""
SAME = ("model", "batch.sequence_length")
"""Tables and keys that are the same in all candidates: steps of other tokens and models are not
comparable."""
FORMS = ("model.attention", "model.loss_dtype")
"""Keys of the model that change how it computes, and no parameter."""
MAX_SIZES = 256
"""Most combinations of nodes, micro-batch and other keys; each has some 18 strategies."""
MOST_NODES = 256
"""Most nodes among which the smallest cluster is sought, where none are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Numbers of nodes, micro-batches, and the global batch in sequences, which accumulation fills.
    `vary`: values of other keys of the scenario, by dotted key. `is_fixed`: the user named the
    global batch.
    """

    nodes: tuple[int, ...]
    micro_batches: tuple[int, ...]
    global_batch: int
    vary: Axes = field(default_factory=lambda: Axes({}))
    is_fixed: bool = False


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A candidate: strategy, checkpointing and varied keys in words, the scenario that it is, and
    options as of `zsim.analysis.fit.fit_table.Candidate`."""

    way: str
    scenario: Scenario
    dropped: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The sizes and the way, as "16 GPUs, micro_batch = 2, zero2, checkpointing"."""
        batch = self.scenario.batch
        return f"{counted(self.gpus, 'GPU')}, micro_batch = {batch.micro_batch}, {self.way}"

    @property
    def gpus(self) -> int:
        """The number of ranks."""
        return self.scenario.world_size


@dataclass(frozen=True, slots=True)
class Refused:
    """A candidate that cannot be, and the reason."""

    name: str
    reason: str


def space_of(
    scenario: Scenario, *, nodes: Sequence[int] = (), micro_batches: Sequence[int] = (),
    global_batch: int | None = None, vary: Mapping[str, Sequence[Any]] | None = None,
    seek: bool = False,
) -> Space:
    """The space that was asked for.

    By default nodes and global batch are the scenario's, or the least multiple of its batch that
    all `nodes` divide. To `seek` nodes, where none are named, is to try all from 1 to 256 that
    divide the global batch. By default the powers of two do. Micro-batches are the powers of two
    that the global batch has room for, and the scenario's. ArgumentError for sizes that are none,
    SweepError for keys to `vary` without a list of values.
    """
    varied = axes_of(vary, where="vary") if vary else Axes({})
    _require_free(varied)
    own, batch = max(1, scenario.world_size // scenario.cluster.devices_per_node), scenario.batch
    whole = batch.micro_batch * batch.accumulation * scenario.world_size
    devices, sought = scenario.cluster.devices_per_node, seek and not nodes
    if global_batch is not None:
        whole = global_batch
    elif sought:
        whole = lcm(whole, MOST_NODES * devices)
    elif all(type(size) is int and 1 <= size <= MAX_SIZES for size in nodes):
        some = scenario.world_size if scenario.world_size < devices else devices
        whole = lcm(whole, *(size * devices if size > 1 else some for size in nodes))
    lists = {"nodes": nodes, "micro_batches": micro_batches, "global_batch": (whole,)}
    for where, sizes in lists.items():
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ArgumentError(
                where=where, expected="numbers from 1 on", found=", ".join(map(str, sizes))[:60]
            )
    if sought:
        nodes = [size for size in range(1, MOST_NODES + 1) if whole % (size * devices) == 0]
    most = max(1, whole // scenario.world_size)
    powers = {2**n for n in range(most.bit_length()) if 2**n <= most}
    chosen = Space(
        is_fixed=global_batch is not None, vary=varied, nodes=tuple(sorted(set(nodes or (own,)))),
        global_batch=whole,
        micro_batches=tuple(sorted(set(micro_batches or (powers | {batch.micro_batch})))),
    )
    pairs = varied.num_points * sum(
        not sought or whole % (size * devices * micro_batch) == 0
        for size, micro_batch in product(chosen.nodes, chosen.micro_batches)
    )
    if pairs > MAX_SIZES:
        raise ArgumentError(
            where="sizes", expected=f"at most {MAX_SIZES} combinations of nodes, micro-batches "
                                    f"and varied keys",
            found=f"{pairs:,}", remedy="name fewer",
        )
    return chosen


def _require_free(varied: Axes) -> None:
    """ArgumentError for keys that the plan sets itself, or that all candidates have in common."""
    for key in varied.values:
        is_same = key in SAME or (key.partition(".")[0] in SAME and key not in FORMS)
        if is_same or key in SIZES:
            raise ArgumentError(
                where="vary", expected="keys beside model, tokens of a sequence, nodes and batch",
                found=key, remedy="`zsim sweep` compares other models and sequences" if is_same
                else "nodes, micro-batches and the global batch are named apart",
            )


def cases(scenario: Scenario, space: Space) -> Iterator[PlanCase | Refused]:
    """Every candidate of the space once, those that cannot be with their reason."""
    known = set[str]()
    for nodes, micro_batch, values in product(
        space.nodes, space.micro_batches, [*space.vary.points()]
    ):
        varied = {key: f", {key} = {in_line(value)}" for key, value in values.items()}
        suffix = "".join(varied.values())
        size = f"{counted(nodes, 'node')}, micro_batch = {micro_batch}{suffix}"
        try:
            changed = _changed(scenario, values)
            sized = _sized(changed, space, nodes=nodes, micro_batch=micro_batch)
        except ScenarioError as error:
            yield Refused(size, error.problems[0])
            continue
        if isinstance(sized, str):
            yield Refused(size, sized)
            continue
        before = scenario if STRATEGY in values else sized
        named = (sized.strategy,) if STRATEGY in values else ()
        for name, case in fit.cases(sized, strategies=named):
            tables, kept = case.to_json(), [text for key, text in varied.items()
                                            if _is_said(key, case, sized)]
            if tables in known:
                continue
            known.add(tables)
            able = PlanCase(
                name + "".join(kept), case, dropped(before, case, way=name),
                offloaded_otherwise(before, case),
            )
            problems = refusals.problems(case)
            yield Refused(able.name, problems[0]) if problems else able


def _changed(scenario: Scenario, values: Mapping[str, Any]) -> Scenario:
    """The scenario with these values; under another strategy it keeps what that can have."""
    name = values.get(STRATEGY, "")
    if name == scenario.strategy or name not in STRATEGIES:
        return scenario.with_(**changes_of(values))
    changes = changes_of({key: value for key, value in values.items() if key != STRATEGY})
    changes["strategy"] = dict.fromkeys(STRATEGIES[name].axes) | changes.get("strategy", {})
    return moved(scenario, name).with_(**changes)


def _is_said(key: str, case: Scenario, sized: Scenario) -> bool:
    """True where the name of a candidate made of `sized` needs its value of the varied `key`.

    Its way says strategy and groups, and another strategy may lack the option, or have its own.
    """
    table, _, option = key.partition(".")
    if table == "activation_checkpointing":
        return case.checkpointing == sized.checkpointing
    if table != "strategy":
        return True
    own, other = asdict(sized.options), asdict(case.options)
    return option in other and bool(own.get(option) == other[option])


def _sized(scenario: Scenario, space: Space, *, nodes: int, micro_batch: int) -> Scenario | str:
    """The scenario with these sizes, or the reason that its batch does not divide."""
    own = scenario.world_size // scenario.cluster.devices_per_node
    if nodes == own or (own == 0 and nodes == 1):
        moved = scenario
    else:
        kind, cluster = STRATEGIES[scenario.strategy], {"nodes": nodes, "ranks": None}
        strategy: dict[str, Any] = dict.fromkeys(kind.axes)
        if kind.on_several_ranks and nodes * scenario.cluster.devices_per_node > 1:
            strategy = {"name": kind.on_several_ranks}
        moved = scenario.with_(cluster=cluster, strategy=strategy)
    together = micro_batch * moved.world_size
    if space.global_batch % together:
        return (
            f"{space.global_batch:,} sequences are no multiple of {micro_batch} on each of "
            f"{moved.world_size:,} ranks"
        )
    batch = {"micro_batch": micro_batch, "accumulation": space.global_batch // together}
    return moved.with_(batch=batch)
