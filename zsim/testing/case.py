"""The case of a test: a backend and a number of ranks, and a scenario on so many."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from zsim.runs import registry
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

Source = Scenario | str | PathLike[str]
SIM = registry.SimBackend.name


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendCase:
    """A test on a backend, with so many ranks, of the marker's scenario; None for not given."""

    backend: str
    world_size: int | None = None
    source: Source | None = None

    @property
    def id(self) -> str:
        """Name in the test's id: "sim-2", or "sim" alone."""
        return self.backend if self.world_size is None else f"{self.backend}-{self.world_size}"

    @property
    def marks(self) -> tuple[str, ...]:
        """Names of markers by which `-m` selects it."""
        size = () if self.world_size is None else (f"world_{self.world_size}",)
        return (f"backend_{self.backend}", *size)


def scaled(scenario: Scenario, world_size: int) -> Scenario:
    """The scenario on so many ranks, without what it expects of another number of them.

    GPUs fill nodes one after another. The outermost axis of the mesh is filled anew, so hsdp keeps
    its dp_shard; what shards over all ranks does so again. ScenarioError where the other axes do
    not divide the number of ranks.
    """
    if world_size == scenario.world_size:
        return scenario
    cluster: dict[str, int | None] = {"ranks": world_size}
    if scenario.cluster.kind == "cuda":
        per_node = scenario.cluster.devices_per_node
        whole = world_size % per_node == 0
        cluster = {
            "nodes": -(-world_size // per_node), "ranks": None if whole else world_size
        }
    kind = STRATEGIES[scenario.strategy]
    sized = [axis for axis in kind.axes if axis in scenario.tables["strategy"]]
    strategy = dict.fromkeys(kind.axes[:1] if len(sized) == len(kind.axes) else ())
    if kind.over_all_ranks == scenario.strategy and scenario.mesh.dp_replicate == 1:
        strategy = dict.fromkeys(kind.axes)
    return scenario.with_(cluster=cluster, strategy=strategy, expect=None)
