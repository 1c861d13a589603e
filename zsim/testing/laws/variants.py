"""Variants of a Run's scenario, planned and simulated, for laws that compare two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from zsim.engine.costs.op_costs import Costs
from zsim.errors import ScenarioError
from zsim.ir.ledger_replay import replay
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.ir.run import MemoryRecord, RunRecord
from zsim.models.spec import run_of
from zsim.models.training_options import Library
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES


def library_of(scenario: Scenario) -> Library:
    """The code that trains by the scenario's strategy."""
    return STRATEGIES[scenario.strategy].library


def stage_of(scenario: Scenario) -> int:
    """The stage of ZeRO that the scenario's strategy is."""
    return STRATEGIES[scenario.strategy].formula.number


def runs_once(scenario: Scenario) -> bool:
    """True where each block runs once before a backward."""
    again = any(run_of(module.fqn) for module in scenario.model.modules)
    return scenario.batch.forwards == 1 and not again


def variant(scenario: Scenario, **tables: Any) -> Scenario | None:
    """The scenario with other tables; None where they do not go together."""
    try:
        return scenario.with_(**tables)
    except ScenarioError:
        return None


def strategy_table(scenario: Scenario, **changes: Any) -> dict[str, Any]:
    """The scenario's table `strategy` with changes; a key with None is left out."""
    table = {**scenario.tables["strategy"], **changes}
    return {key: value for key, value in table.items() if value is not None}


@lru_cache(maxsize=2)
def program_of(scenario: Scenario) -> Program:
    """The Program for the scenario's own cluster."""
    return plan(scenario, device=scenario.cluster.kind)


def simulated(scenario: Scenario, *, all_ranks: bool = False) -> RunRecord:
    """The simulated record of the scenario."""
    return SimBackend().run(scenario, options=RunOptions(all_ranks=all_ranks))


def costs_of(scenario: Scenario, *, faster: int = 1) -> Costs:
    """The costs of ops on the scenario's cluster, without interference, and with `faster` times the
    bandwidth of each link."""
    links = scenario.cluster.links
    wider = {
        kind: replace(getattr(links, kind), bandwidth=getattr(links, kind).bandwidth * faster)
        for kind in ("fabric", "pcie", "host", "rail")
    }
    cluster = replace(scenario.cluster, links=replace(links, **wider))
    return Costs(cluster=cluster, execution=replace(scenario.executed, interference=False))


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The steady step of a scenario without its times: memory of each kind of rank, and the
    collectives of the first rank."""

    memory: tuple[MemoryRecord, ...]
    collectives: tuple[tuple[str, int], ...]

    @property
    def peak(self) -> int:
        """The most allocated bytes of any rank."""
        return max(each.peak_bytes for each in self.memory)

    @property
    def before_backward(self) -> int:
        """The most bytes that a rank has allocated when its first backward begins."""
        parts = (next(part for part in each.parts if part.name == "backward")
                 for each in self.memory)
        return max(part.start_bytes for part in parts)

    def most(self, kind: str) -> int:
        """The most bytes of `kind` that a rank holds from step to step."""
        return max(each.held.get(kind, 0) for each in self.memory)

    def payload(self, *ops: str) -> int:
        """Bytes in collectives of these kinds."""
        return sum(nbytes for op, nbytes in self.collectives if op in ops)


@lru_cache(maxsize=2)
def step_of(scenario: Scenario) -> PlannedStep:
    """The scenario's steady step, planned and replayed: a third of a simulation's time."""
    program = program_of(scenario)
    memory = tuple(replay(rank, timeline=False)["steady"] for rank in program.ranks)
    steady = program.of_rank(0).steady
    return PlannedStep(
        memory, tuple((op.kind, op.nbytes) for op in steady if op.kind in COLLECTIVES)
    )
