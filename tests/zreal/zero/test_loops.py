"""`zreal.ZeRO` in loops as users write them: autocast, failed batches, dropped steps, saved states.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zreal
from tests.support.cases.sampling import one_in
from tests.zreal.zero.test_zero import on_ranks, sgd
from tests.zreal.zero.zero_ranks import Rotating, Turn
from zreal import torch_private
from zsim.errors import ArgumentError


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 3])
def test_failed_batches_and_dropped_steps_leave_no_trace(stage: int) -> None:
    for rank in on_ranks("unfinished", stage=stage):
        assert rank["differ"] == []
        assert rank["held"] == [True] * 3
        assert rank["losses"][-1] < rank["losses"][0]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", one_in(2, [3, 1]))
def test_a_state_goes_into_a_module_on_the_meta_device_and_out_into_a_plain_one(
    stage: int,
) -> None:
    ranks = on_ranks("saved", stage=stage)
    for rank in ranks:
        assert rank["trained"]
        assert rank["tied"]
        assert rank["same"] is (rank is ranks[0])
        assert rank["angles"] == [0, 1, 2, 3, 4, 5, 6]
    assert ranks[1]["names"] == 0 < ranks[0]["names"]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "caches"), [(1, True), (3, True), (3, False)])
def test_a_loop_in_autocast_trains_as_one_process(stage: int, caches: bool) -> None:
    for rank in on_ranks("autocast", stage=stage, caches=caches):
        assert rank["furthest"] < 1e-6  # sums over ranks are made in another order


def test_a_buffer_that_no_state_has_must_be_made_by_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = Rotating().state_dict()
    with torch_private.fake_group(rank=0, world_size=2):
        with torch.device("meta"):
            model: nn.Module = Rotating()
        monkeypatch.delattr(Turn, "reset_parameters")
        with pytest.raises(ArgumentError, match=r"turn.angles: .* give its value in state= too"):
            zreal.ZeRO(model, sgd(model), state=state)
        zreal.ZeRO(model, sgd(model), state=state | {"turn.angles": torch.zeros(7)})
