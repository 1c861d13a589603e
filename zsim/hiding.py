"""The smallest change that would hide exposed communication: each candidate simulated again, with what it costs and gains.

More lookahead, other units, a larger micro-batch, faster links: a user can try none of them by thought alone, since each moves what
waits for what. A time is given for each token, so that a larger batch is not taken for a slower step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from zsim import wrapping
from zsim.costs import Costs
from zsim.engine import Timeline
from zsim.execution import Execution
from zsim.ops import Kernel, Op
from zsim.plan import plan
from zsim.program import Program
from zsim.scenario import Scenario
from zsim.slowdown import simulate_step
from zsim.why import explain
from zsim.work import MANY_TIMES
from zsim.wrapping import Wrapping

HIDDEN = 0.01
"""Communication counts as hidden when less than this share of the step is exposed."""
NOTHING = 0.005
"""A gain of less is none."""
LOOKAHEADS = (1, 2, 3, 4)
FACTORS = (1.25, 1.5, 2.0, 4.0, 8.0)
BATCHES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faster:
    """`costs` with collectives `factor` times as fast."""

    costs: Costs
    factor: float

    @property
    def execution(self) -> Execution:
        """As before."""
        return self.costs.execution

    @property
    def interference(self) -> float:
        """As before."""
        return self.costs.interference

    @property
    def collective_interference(self) -> float:
        """As before."""
        return self.costs.collective_interference

    @property
    def launch_queue(self) -> int:
        """As before."""
        return self.costs.launch_queue

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        """As before."""
        return self.costs.compute_ns(kernels)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """A share of what it was, at least 1."""
        return max(1, round(self.costs.collective_ns(kind, nbytes, ranks) / self.factor))

    def usage(self, ranks: tuple[int, ...]) -> Mapping[str, Fraction]:
        """As before: shares of links that are faster alike."""
        return self.costs.usage(ranks)

    def issue_ns(self, op: Op) -> int:
        """As before."""
        return self.costs.issue_ns(op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is changed, in the scenario's words, and what comes of it: time per token of one rank, and the exposed share."""

    words: str
    ns_per_token: float
    exposed: float

    @property
    def hides(self) -> bool:
        """Whether nothing worth speaking of is exposed."""
        return self.exposed < HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """The scenario as it is, and of each kind of change the smallest that hides the communication, or the best where none does."""

    now: Change
    changes: tuple[Change, ...]
    untried: str = ""
    """Why no change was tried, where simulating that often would take minutes."""


def hiding(scenario: Scenario) -> Hiding:
    """What would hide the scenario's communication; nothing where it is hidden already."""
    program = plan(scenario, device=scenario.cluster.kind)
    costs = Costs(cluster=scenario.cluster, execution=scenario.execution)
    now = _measured("as it is", scenario, program, simulate_step(program, costs=costs))
    untried = "" if now.hides else scenario.work.problem(part=MANY_TIMES)
    if now.hides or untried:
        return Hiding(now=now, changes=(), untried=untried)
    kinds = (_lookaheads(scenario), _units(scenario), _batches(scenario))
    found = [_smallest(_tried(words, changed) for words, changed in kind) for kind in kinds]
    links = (
        _measured(f"links {factor:g} times as fast", scenario, program, simulate_step(program, costs=Faster(costs=costs, factor=factor)))
        for factor in FACTORS
    )
    return Hiding(now=now, changes=tuple(change for change in (*found, _smallest(links)) if change is not None))


def _smallest(changes: Iterator[Change]) -> Change | None:
    """The first that hides, else the first that is as good as any: more that gains nothing is not asked for."""
    seen: list[Change] = []
    for change in changes:
        seen.append(change)
        if change.hides:
            return change
    best = min((change.ns_per_token for change in seen), default=0.0)
    return next((change for change in seen if change.ns_per_token <= best * (1 + NOTHING)), None)


def _tried(words: str, scenario: Scenario) -> Change:
    program = plan(scenario, device=scenario.cluster.kind)
    costs = Costs(cluster=scenario.cluster, execution=scenario.execution)
    return _measured(words, scenario, program, simulate_step(program, costs=costs))


def _measured(words: str, scenario: Scenario, program: Program, timeline: Timeline) -> Change:
    batch = scenario.batch
    tokens = batch.micro_batch * batch.sequence_length * batch.accumulation * batch.forwards
    exposed = sum(one.exposed_ns for one in explain(program, timeline).exposed)
    return Change(words=words, ns_per_token=timeline.step_time_ns / tokens, exposed=exposed / max(1, timeline.step_time_ns))


def _lookaheads(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """More units gathered ahead, where the strategy has an option for that."""
    names = {field.name for field in fields(scenario.options)}
    prefetches = [name for name in ("lookahead", "forward_prefetch", "backward_prefetch") if name in names]
    prefetches = [name for name in prefetches if type(getattr(scenario.options, name)) is int]
    if not prefetches:
        return
    least = max(getattr(scenario.options, name) for name in prefetches)
    for ahead in LOOKAHEADS:
        if ahead > least:
            options = replace(scenario.options, **dict.fromkeys(prefetches, ahead))
            yield " and ".join(f"{name} = {ahead}" for name in prefetches), replace(scenario, options=options)


def _units(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Two, four blocks in a param group instead of one, and one instead of several."""
    model = scenario.model
    if model.family == wrapping.TRACED or len(model.blocks) < 2:
        return
    for every in (1, 2, 4):
        asked = Wrapping(every=every)
        if asked != scenario.wrapping and not tuple(wrapping.problems(asked, model)):
            yield f"wrapping.every = {every}", replace(scenario, wrapping=asked, model=wrapping.wrapped(model, asked))


def _batches(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    if scenario.model.family == wrapping.TRACED:
        return
    for times in BATCHES:
        size = scenario.batch.micro_batch * times
        yield f"micro_batch = {size}", replace(scenario, batch=replace(scenario.batch, micro_batch=size))
