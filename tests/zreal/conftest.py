"""Torch's warnings in every test that raises them, and launches that time out by an event.

torch raises some warnings once per process by default, and a test would depend on those that ran
before it. An event takes the place of a time that a busy machine may need for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from zreal.processes import launch
from zreal.processes.rank_status import RankStatus

torch.set_warn_always(True)
launch.PRELOAD.append("tests.support.brief_timing")

Condition = Callable[[list[RankStatus]], bool]
TimeOutWhen = Callable[[Condition], None]


@pytest.fixture
def time_out_when(monkeypatch: pytest.MonkeyPatch) -> TimeOutWhen:
    """Let every launch time out once a condition of its ranks holds, and never before."""
    supervise = launch._supervise

    def install(condition: Condition) -> None:
        def watch(ranks: list[RankStatus], *, deadline: float, **more: Any) -> None:
            while not condition(ranks):
                time.sleep(0.01)
                for rank in ranks:
                    rank.note_progress()
                    rank.receive()
            supervise(ranks, deadline=0.0, **more)

        monkeypatch.setattr(launch, "_supervise", watch)

    return install
