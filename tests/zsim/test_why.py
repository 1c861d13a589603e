"""Why a step takes as long as it does, on programs whose times can be seen at a glance; and what slows ops down besides their work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from zsim import scenario
from zsim.costs import Costs
from zsim.engine import Delays, simulate
from zsim.execution import EAGER, Execution
from zsim.hiding import hiding
from zsim.mesh import Mesh
from zsim.ops import Kernel, Op
from zsim.plan import plan
from zsim.program import Program, RankProgram
from zsim.slowdown import simulate_step
from zsim.why import LONGER, explain, name

SCENARIOS = Path(__file__).parents[2] / "scenarios"


@dataclass(frozen=True)
class Toy:
    """A kernel takes as many nanoseconds as it has FLOPs, a collective as many as bytes; issuing takes `issue` each."""

    issue: int = 0
    share: float = 0.0
    launch_queue: int = 0
    execution: Execution = EAGER

    @property
    def interference(self) -> float:
        return self.share

    @property
    def collective_interference(self) -> float:
        return 0.0

    def compute_ns(self, kernels: tuple[Kernel, ...]) -> int:
        return sum(kernel.flops for kernel in kernels)

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        return nbytes

    def issue_ns(self, op: Op) -> int:
        return self.issue


def forward(index: int, unit: str, ns: int, *waits: int, micro_batch: int = 0) -> Op:
    kernels = (Kernel("linear", ns, 0, "float32"),)
    return Op(
        index=index, kind="forward", unit=unit, stream="compute", kernels=kernels, waits=waits, micro_batch=micro_batch
    )


def gather(index: int, unit: str, ns: int, *waits: int) -> Op:
    return Op(index=index, kind="all_gather", unit=unit, stream="all_gather", group="dp_shard", nbytes=ns, waits=waits)


def program(*ops: Op) -> Program:
    return Program(
        mesh=Mesh(dp_shard=2), ranks=(RankProgram(construction=(), first=(), steady=ops),), assignment=(0, 0)
    )


def test_each_exposed_collective_says_what_it_waited_for() -> None:
    """a's gather opens the step; b's runs beside a and outlasts it; c's waits in the queue behind b's; d's for a dependency."""
    step = program(
        gather(0, "a", 10),
        forward(1, "a", 20, 0),
        gather(2, "b", 30, 0),
        forward(3, "b", 5, 2),
        gather(4, "c", 40),
        forward(5, "c", 5, 4),
        gather(6, "d", 7, 5),
        forward(7, "d", 1, 6),
    )
    found = explain(step, simulate(step, costs=Toy()))
    by_name = {name(one.op): (one.exposed_ns, one.reason, one.waited_for) for one in found.exposed}
    assert by_name == {
        "all_gather a": (10, "the host", ""),
        "all_gather b": (10, LONGER, "all_gather a"),
        "all_gather c": (35, "its communicator's queue", "all_gather b"),
        "all_gather d": (7, "a dependency", "forward c"),
    }
    assert found.step_ns == 93
    assert sum(found.by_reason.values()) == 10 + 10 + 35 + 7
    assert not found.host_bound


def test_the_critical_path_goes_from_the_first_op_to_the_last_without_a_gap() -> None:
    step = program(gather(0, "a", 10), forward(1, "a", 20, 0), gather(2, "b", 30, 0), forward(3, "b", 5, 2))
    found = explain(step, simulate(step, costs=Toy()))
    assert [(name(link.op), link.start_ns, link.end_ns) for link in found.critical_path] == [
        ("all_gather a", 0, 10),
        ("all_gather b", 10, 40),
        ("forward b", 40, 45),
    ]
    assert found.critical_path[0].then == "all_gather b waits for it"
    assert found.critical_path[-1].then == "the step is over"


@pytest.mark.parametrize(
    "path", ["overlap/zero3-llama-3-8b-8-lookahead-0", "published/llama-3-8b-8-h100", "parity/fsdp2-gpt-4"]
)
def test_exposed_time_is_what_the_run_says_and_the_critical_path_is_as_long_as_the_step(path: str) -> None:
    asked = scenario.load(SCENARIOS / f"{path}.toml")
    planned = plan(asked, device=asked.cluster.kind)
    costs = Costs(cluster=asked.cluster, execution=asked.execution)
    timeline = simulate_step(planned, costs=costs)
    found = explain(planned, timeline)
    times = timeline.ranks[found.rank]
    compute = [op for op in planned.of_rank(found.rank).steady if op.stream == "compute"]
    busy = sum(times.ends[op.index] - times.starts[op.index] for op in compute)
    assert sum(one.exposed_ns for one in found.exposed) <= found.step_ns - busy
    links = found.critical_path
    assert links[-1].end_ns == found.step_ns
    assert all(earlier.end_ns <= later.start_ns for earlier, later in zip(links, links[1:], strict=False))


def test_a_step_that_waits_for_the_host_says_so() -> None:
    step = program(*(forward(index, "a", 1) for index in range(10)))
    found = explain(step, simulate(step, costs=Toy(issue=5)))
    assert (found.step_ns, found.host_bound_ns, found.host_bound) == (51, 5 + 9 * 4, True)


def test_kernels_lose_a_share_of_the_time_in_which_collectives_run_beside_them() -> None:
    """b's gather of 40 runs beside all of a's 100: 20 % of 40 are lost."""
    step = program(gather(0, "a", 10), forward(1, "a", 100, 0), gather(2, "b", 40, 0), forward(3, "b", 50, 2))
    assert simulate_step(step, costs=Toy()).step_time_ns == 160
    assert simulate_step(step, costs=Toy(share=0.2)).step_time_ns == 168


def test_pauses_of_the_trainer_stop_host_and_device() -> None:
    """Two micro-batches of 100, with 30 before each; where the host is slower than the device it is the host's pause that counts."""
    step = program(forward(0, "a", 100), forward(1, "a", 100, micro_batch=1))
    paused = Execution(micro_batch_overhead_ns=30)
    assert simulate_step(step, costs=Toy(execution=paused)).step_time_ns == 30 + 2 * (30 + 100)
    slow = simulate_step(step, costs=Toy(issue=500, execution=paused))
    assert slow.ranks[0].issued == [530, 1060]
    assert slow.step_time_ns == 1060 + 30 + 100


def test_delays_of_one_op_are_its_own() -> None:
    step = program(forward(0, "a", 10), forward(1, "b", 10))
    times = simulate(step, costs=Toy(), delays=[Delays({0: 5}, {1: 40})]).ranks[0]
    assert (times.starts, times.ends) == ([0, 40], [15, 50])


def small(micro_batch: int, *, lookahead: int = 0, dp: int = 8) -> scenario.Scenario:
    text = f"""
model.family = "mlp"
model.sizes = {{ dims = [{", ".join(["4096"] * 9)}], hidden = 16384, num_classes = 1024 }}
batch = {{ micro_batch = {micro_batch} }}
cluster = {{ preset = "dgx-h100", nodes = {dp // 8} }}
strategy = {{ name = "zero3", dp_shard = {dp}, lookahead = {lookahead} }}
precision = {{ parameters = "bf16", reduce = "bf16" }}
execution = {{ interference = false }}
"""
    return scenario.parse(text.encode(), where="small.toml")


def test_of_uniform_layers_one_unit_of_lookahead_hides_what_any_number_does() -> None:
    """The published claims T3 and T4: one communicator is one queue, so with layers that are alike a deeper lookahead gains nothing."""
    asked = small(8192)
    found = hiding(asked)
    ahead = next(change for change in found.changes if "lookahead" in change.words)
    times = {
        k: simulate_step(
            plan(one, device="cuda"), costs=Costs(cluster=one.cluster, execution=one.execution)
        ).step_time_ns
        for k in (0, 1, 2, 3)
        for one in [replace(asked, options=replace(asked.options, lookahead=k))]
    }
    assert times[1] < times[0]
    assert times[3] >= times[1] * 0.99
    assert ahead.words == "lookahead = 1"


def test_the_breakeven_batch_is_the_smallest_that_hides_the_communication() -> None:
    asked = small(1024, lookahead=1)
    found = hiding(asked)
    batch = next(change for change in found.changes if change.words.startswith("micro_batch"))
    links = next(change for change in found.changes if change.words.startswith("links"))
    assert found.now.exposed > batch.exposed
    assert found.now.exposed > links.exposed
    assert links.ns_per_token < found.now.ns_per_token
