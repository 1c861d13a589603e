"""Curves in which ranks of a node, more and more of them, fill its PCIe switches and its drives."""

import pytest

from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.engine.simulate import simulate
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Location
from zsim.strategies.building.step_builder import StepBuilder, spmd

NBYTES = 10**9
A100 = load_cluster("dgx-a100")
PER_SWITCH = 2


def rate(
    operator: str, location: Location, ranks: int, *, execution: Execution | None = None
) -> float:
    """Bytes/s of a rank, as so many do the same at once."""
    step = StepBuilder()
    stream = "to_host" if location == "link" else "drive_read"
    kernels = (Kernel(operator, 0, NBYTES, "float32", location),)
    step.issue("copy", "state", stream=stream, kernels=kernels)
    mesh = Mesh(dp_replicate=1, dp_shard=ranks)
    program = spmd(mesh, construction=StepBuilder(), first=StepBuilder(), steady=step)
    costs = Costs(load_cluster("dgx-a100", ranks=ranks), execution or Execution())
    times = simulate(program, costs=costs, all_ranks=True).ranks.values()
    (took,) = {each.ends[0] - each.starts[0] for each in times}
    return NBYTES * 10**9 / took


def test_a_switch_is_full_with_one_of_its_devices_and_others_leave_it_alone() -> None:
    link = A100.links.host.bandwidth
    curve = [rate("to_host", "link", ranks) for ranks in (1, 2, 4, 6, 8)]
    assert curve == pytest.approx([link, *[link / PER_SWITCH] * 4], rel=1e-6)
    assert rate("to_host_pageable", "link", 8) == pytest.approx(link * 0.4, rel=1e-6)


def test_drives_are_full_with_one_rank_of_tuned_requests_and_shared_by_all() -> None:
    assert A100.drives is not None
    curve = [rate("read", "drive", ranks) for ranks in (1, 2, 4, 8)]
    assert curve == pytest.approx([A100.drives.read / ranks for ranks in (1, 2, 4, 8)], rel=1e-6)


@pytest.mark.parametrize(("queue", "full"), [(2**20, 5), (2**21, 3), (2**22, 2)])
def test_few_requests_at_once_leave_drives_idle_until_enough_ranks_have_some(
    queue: int, full: int
) -> None:
    """A rank is as fast as alone, until all together want more than there is."""
    assert A100.drives is not None
    read = A100.drives.read
    alone = 1 / (1 / read + 200e-6 / queue)  # its time on the drive, and its part of the latency
    execution = Execution(drive_queue_nbytes=queue)
    curve = [rate("read", "drive", ranks, execution=execution) for ranks in range(1, 9)]
    assert curve == pytest.approx([min(alone, read / n) for n in range(1, 9)], rel=1e-6)
    assert next(n for n in range(1, 9) if n * alone > read) == full
