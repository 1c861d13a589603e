"""Random scenarios with a fault each, put through all laws, and the situations that they hit.

A sweep of them says little if it never met what is hard. So each scenario says which of the listed
situations it was, and a sweep is red that has hit some of them too seldom.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import zsim
from tests.support.faulty.fault_modes import live, safe
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.ir.run import RankRun, Span
from zsim.testing.laws import check_laws
from zsim.testing.laws.variants import program_of, runs_once
from zsim.testing.strategies import scenario_tables
from zsim.testing.strategies.scenarios import RANKS
from zsim.testing.strategies.tables import PLAIN, STRATEGIES, Tables

SCALES = (1, 128, 512, 2048)
"""Factors of the hidden size of 8: time and memory grow, and the number of ops does not."""


@st.composite
def cases(
    draw: st.DrawFn, strategy_name: str, two_nodes: bool = False
) -> tuple[zsim.Scenario, int]:
    """A scenario with that strategy, made larger, and a number that decides on a fault's details.

    Where `two_nodes` are asked for, most scenarios of GPUs have them.
    """
    sizes = draw(st.sampled_from([RANKS, (8,)])) if two_nodes else RANKS
    tables = draw(scenario_tables(strategies=(strategy_name,), sizes=sizes))
    model, batch, cluster = (dict(tables[key]) for key in ("model", "batch", "cluster"))
    scale = draw(st.sampled_from(SCALES if cluster["preset"] != "cpu-gloo" else SCALES[:2]))
    if "hidden_size" in model["sizes"] and scale > 1:
        sizes, heads = dict(model["sizes"]), max(4, scale // 8)
        sizes |= {"hidden_size": 8 * scale, "num_heads": heads}
        if "num_kv_heads" in sizes:
            sizes |= {"num_kv_heads": heads // 2, "feed_forward": 10 * scale}
        model["sizes"] = sizes
        batch["sequence_length"] = draw(st.sampled_from([1024, 64, 8192]))
        batch["micro_batch"] = draw(st.sampled_from([1, 2, 8]))
    strategy = dict(tables["strategy"])
    if cluster["ranks"] == 8 and cluster["preset"] != "cpu-gloo" and draw(st.booleans()):
        cluster = {"preset": cluster["preset"], "nodes": 2}
        if "dp_shard" in strategy:
            strategy["dp_shard"] *= 2
    made = {"model": model, "batch": batch, "cluster": cluster, "strategy": strategy}
    scenario = zsim.Scenario(**{**tables, **made})
    return scenario, draw(st.integers(0, 10**6))


def check(scenario: zsim.Scenario, fault: str, number: int) -> Counter[str]:
    """The situations that a scenario is, each counted once; LawError where it breaks a law."""
    run = zsim.simulate(scenario)
    check_laws(run)
    program = program_of(scenario)
    facts = Facts(run, program)
    met = Counter(name for name, holds in SITUATIONS.items() if holds(facts))
    if scenario.world_size > 1:
        met[check_fault(run, program, fault, number)] += 1
    return met


@dataclass(frozen=True, slots=True)
class Facts:
    """A Run, its Program, and shortcuts to them."""

    run: zsim.Run
    program: Program

    @property
    def scenario(self) -> zsim.Scenario:
        return self.run.scenario

    @property
    def rank(self) -> RankRun:
        return self.run.ranks[0]

    def gathers(self) -> list[tuple[Span, int]]:
        """The all-gathers of a step but for the first, each with the ns in which nothing computes.
        """
        compute = [span for span in self.rank.spans if span.stream == "compute"]
        own = [span for span in self.rank.spans if span.kind == "all_gather"]
        return [(span, span.end_ns - span.start_ns - _over(span, compute)) for span in own[1:]]

    def rows(self) -> list[tuple[int, int]]:
        """Rows of each parameter, and the shards that they are cut into."""
        shards = self.scenario.mesh.dp_shard
        return [(each.shape[0], shards) for each in self.scenario.model.parameters]


def _over(span: Span, compute: list[Span]) -> int:
    """Nanoseconds of `span` in which one of `compute` runs."""
    return sum(
        max(0, min(span.end_ns, each.end_ns) - max(span.start_ns, each.start_ns))
        for each in compute
    )


def is_fully_sharded(facts: Facts) -> bool:
    return facts.scenario.strategy in ("fsdp2", "hsdp")


SITUATIONS: Mapping[str, Callable[[Facts], bool]] = {
    "uneven shard": lambda facts: is_fully_sharded(facts) and any(
        rows % shards for rows, shards in facts.rows()
    ),
    "empty shard": lambda facts: is_fully_sharded(facts) and any(
        (shards - 1) * -(-rows // shards) >= rows for rows, shards in facts.rows() if shards > 1
    ),
    "ranks of several Programs": lambda facts: len(facts.program.ranks) > 1,
    "padded flat buffer": lambda facts: facts.scenario.strategy in ("zero1", "zero2", "zero3")
    and any(unit.numel % facts.scenario.mesh.dp_shard for unit in facts.scenario.model.units),
    "tie": lambda facts: bool(facts.scenario.tables["model"]["sizes"].get("tied")),
    "hsdp": lambda facts: facts.scenario.strategy == "hsdp"
    and min(facts.scenario.mesh.shape) > 1,
    "one rank": lambda facts: facts.scenario.world_size == 1,
    "two nodes": lambda facts: facts.scenario.cluster.num_nodes > 1,
    "accumulation": lambda facts: facts.scenario.batch.accumulation > 1,
    "accumulation without reduction": lambda facts: facts.scenario.batch.accumulation > 1
    and facts.scenario.sync == "last",
    "full checkpointing": lambda facts: facts.scenario.checkpointing.mode == "full",
    "selective checkpointing": lambda facts: facts.scenario.checkpointing.mode == "selective",
    "clip": lambda facts: facts.scenario.optimizer.clip_norm > 0,
    "frozen": lambda facts: "frozen" in facts.scenario.tables,
    "unused block": lambda facts: "unused" in facts.scenario.tables["model"],
    "block that runs twice": lambda facts: not runs_once(facts.scenario),
    "autocast": lambda facts: facts.scenario.precision.autocast != "none",
    "two dtypes": lambda facts: facts.scenario.precision.parameters
    != facts.scenario.precision.reduce,
    "nested units": lambda facts: "nested" in facts.scenario.tables.get("wrapping", {}),
    "out of memory": lambda facts: facts.run.fits is False,
    "fits": lambda facts: facts.run.fits is True,
    "prefetch that hides": lambda facts: any(
        not exposed for _, exposed in facts.gathers()
    ),
    "prefetch that cannot hide": lambda facts: any(
        exposed and exposed < span.end_ns - span.start_ns for span, exposed in facts.gathers()
    ),
    "CPU": lambda facts: facts.scenario.cluster.kind == "cpu",
    "GPU": lambda facts: facts.scenario.cluster.kind == "cuda",
    **{
        name: lambda facts, name=name: facts.scenario.strategy == name  # type: ignore[misc]
        for name in ("ddp", "zero_redundancy", "zero1", "zero2", "zero3", "fsdp2", "fsdp1")
    },
}
FAULTS = (
    "straggler", "late start", "jitter", "fault during an all-gather", "fault during a reduction",
    "fault in compute", "skipped collective", "reordered collective", "slow link", "lost link",
)
LISTED = (*SITUATIONS, *FAULTS, "lost link that carries nothing")
"""Every situation that a sweep must hit."""


def check_fault(run: zsim.Run, program: Program, name: str, number: int) -> str:
    """The situation of a fault of that name in the scenario of `run`, a clean one.

    `number` decides the fault's details. The scenario with it is simulated, and both modes of
    `tests.support.faulty.fault_modes` are asked of it.
    """
    scenario = run.scenario
    rank, turn = number % scenario.world_size, number // scenario.world_size
    delay: dict[str, Tables] = {
        "straggler": {"kind": "slow_rank", "rank": rank, "factor": 1.5 + turn % 7 / 2},
        "late start": {"kind": "late_start", "rank": rank, "by": f"{1 + turn % 50} us"},
        "jitter": {
            "kind": "jitter", "mean": f"{1 + turn % 5000} ns",
            "each": "op" if turn % 2 else "step", "seed": number,
        },
    }
    if name in delay:
        faulty = scenario.with_(faults=[delay[name]])
        safe(faulty, run)
        live(faulty)
        return name
    if name in LINKS:
        return check_link(run, name, turn)
    likely = [
        f"{op.kind} {op.unit}" for op in program.of_rank(rank).steady
        if op.kind in STOPS[name] and not (op.group and program.mesh.size(op.group) == 1)
    ]
    if not likely:
        return "no such op"
    at = likely[turn % len(likely)]
    kind = STOPPING.get(name, "failure")
    try:
        result = safe(scenario.with_(faults=[{"kind": kind, "rank": rank, "at": at}]), run)
    except zsim.ScenarioError:  # no collective follows the one to exchange it with
        assert kind == "reordered_collective"
        return "no such op"
    if isinstance(result, zsim.Run):
        return f"{name} that nobody notices"
    return "nothing left to issue" if "no rank waits" in result.found else name


def check_link(run: zsim.Run, name: str, turn: int) -> str:
    """The situation of a link that is slow or lost, which `turn` picks."""
    cluster = run.scenario.cluster
    link = {"node": turn % cluster.num_nodes, "nic": turn // 2 % cluster.nics_per_node}
    result = safe(run.scenario.with_(faults=[{**LINKS[name], **link}]), run)
    if not (isinstance(result, zsim.Run) and result.warnings[-1:] != run.warnings[-1:]):
        return name
    assert result.step_time == run.step_time, "a link that carries nothing made a difference"
    return f"{name} that carries nothing"


LINKS: dict[str, Tables] = {
    "slow link": {"kind": "slow_link", "bandwidth": "100 Mbit/s"},
    "lost link": {"kind": "lost_link"},
}
STOPS: dict[str, tuple[str, ...]] = {
    "fault during an all-gather": ("all_gather",),
    "fault during a reduction": ("reduce_scatter", "all_reduce"),
    "fault in compute": ("forward", "backward", "optimizer"),
    "skipped collective": tuple(COLLECTIVES), "reordered collective": tuple(COLLECTIVES),
}
"""Kinds of the ops at which each fault may be."""
STOPPING = {
    "skipped collective": "skipped_collective", "reordered collective": "reordered_collective",
}
"""The kind of each fault at an op that is no failure."""


SEVERAL = tuple(name for name in STRATEGIES if name not in PLAIN)
"""Strategies of several ranks, which await one another."""
PAIRS = [(strategy, fault) for strategy in SEVERAL for fault in FAULTS]
"""Strategies and faults, of which a sweep draws as many scenarios each."""


def sweep(
    each: int, pairs: Sequence[tuple[str, str]] = PAIRS, *, first_seed: int = 0
) -> tuple[Counter[str], list[str]]:
    """The situations of `each` scenarios for each pair, which hypothesis draws by `first_seed`, and
    what was wrong with any of them."""
    met, wrong = Counter[str](), list[str]()
    for strategy, fault in pairs:
        number = first_seed * len(PAIRS) + PAIRS.index((strategy, fault))
        _sweep_of(strategy, fault, each, number, met, wrong)
    return met, wrong


def _sweep_of(
    strategy: str, fault: str, number: int, drawn_by: int, met: Counter[str], wrong: list[str]
) -> None:
    @seed(drawn_by)
    @settings(
        max_examples=number, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=False,
    )
    @given(cases(strategy, two_nodes=fault in LINKS))
    def through_all_laws(case: tuple[zsim.Scenario, int]) -> None:
        scenario, drawn = case
        try:
            met.update({"scenarios": 1, **check(scenario, fault, drawn)})
        except Exception as error:
            wrong.append(f"{error!r}\n{fault} {drawn}, as a scenario file:\n{scenario.to_toml()}")

    through_all_laws()


def too_seldom(met: Mapping[str, int], *, least: int) -> dict[str, int]:
    """The listed situations that were hit less than `least` times."""
    return {name: met.get(name, 0) for name in LISTED if met.get(name, 0) < least}
