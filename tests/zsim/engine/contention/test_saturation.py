"""Curves in which ranks of a node, more and more of them, fill its PCIe switches and its drives."""

from __future__ import annotations

import pytest

from tests.benchmarks.saturation import queued, rate, shared
from tests.support.folders import ROOT
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.execution import Execution

A100 = load_cluster("dgx-a100")
PER_SWITCH = 2


def test_a_switch_is_full_with_one_of_its_devices_and_others_leave_it_alone() -> None:
    link = A100.links.host.bandwidth
    curve = [rate("to the host", ranks) for ranks in (1, 2, 4, 6, 8)]
    assert curve == pytest.approx([link, *[link / PER_SWITCH] * 4], rel=1e-6)
    assert rate("pageable", 8) == pytest.approx(link * 0.4, rel=1e-6)


def test_drives_are_full_with_one_rank_of_tuned_requests_and_shared_by_all() -> None:
    assert A100.drives is not None
    curve = [rate("drives, read", ranks) for ranks in (1, 2, 4, 8)]
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
    curve = [rate("drives, read", ranks, execution=execution) for ranks in range(1, 9)]
    assert curve == pytest.approx([min(alone, read / n) for n in range(1, 9)], rel=1e-6)
    assert next(n for n in range(1, 9) if n * alone > read) == full


def test_the_page_has_the_curves() -> None:
    told = (ROOT / "zsim" / "strategies" / "README.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in (*shared("dgx-a100"), *queued("dgx-a100")) if row not in told] == []


def test_every_preset_of_gpus_has_curves_that_only_fall() -> None:
    """More ranks never make one faster, whatever it does."""
    for cluster in ("dgx-h100", "pcie-box", "dgx-b200"):
        for row in list(zip(*(
            map(float, line.strip("| ").split(" | ")) for line in list(shared(cluster))[2:]
        ), strict=True))[1:]:
            assert list(row) == sorted(row, reverse=True)
