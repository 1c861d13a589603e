"""The meeting of ranks before their first collective: all hear one answer, and it names those that
differ, are missing or have failed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from zreal.cluster.launcher import LaunchedRank
from zreal.cluster.meeting import meet, store_of
from zsim.errors import ZsimError

LIMIT_S = 1.0
ALIKE = {"scenario's fingerprint": "a1", "version of torch": "2.13"}


def answers(
    *told: dict[str, str] | None, failures: Sequence[str] = (), wishes: Sequence[str] = ()
) -> list[list[str] | str]:
    """Answers to ranks with the claims `told`; a rank with None does not come."""
    store, size = dist.HashStore(), len(told)

    def heard(rank: int) -> list[str] | str:
        launched = LaunchedRank(
            rank=rank, world_size=size, local_rank=rank, local_world_size=size, node=0,
            launcher="torchrun", address="localhost", port=29500,
        )
        failure = failures[rank] if failures else ""
        wish = wishes[rank] if wishes else ""
        try:
            return meet(store, launched, told[rank] or {}, wish, timeout_s=LIMIT_S, failure=failure)
        except ZsimError as error:
            return f"{type(error).__name__}: {error}"

    there = [rank for rank in range(size) if told[rank] is not None]
    with ThreadPoolExecutor(max_workers=size) as ranks:
        return list(ranks.map(heard, there))


def test_ranks_that_claim_the_same_hear_the_wish_of_each() -> None:
    wishes = ["full: there is room", "none: no time"]
    assert answers(ALIKE, ALIKE, wishes=wishes) == [wishes, wishes]


@pytest.mark.parametrize(("other", "said"), [
    ({"scenario's fingerprint": "b2"}, "the scenario's fingerprint of rank 0, a1, found b2"),
    ({"version of torch": "2.12"}, "the version of torch of rank 0, 2.13, found 2.12"),
])
def test_every_rank_is_told_who_claims_something_else_than_rank_0(
    other: dict[str, str], said: str
) -> None:
    refused = (
        f"LauncherError: rank 1: expected {said}; start every rank with the same files and the "
        "same installation; a module must not depend on its rank"
    )
    assert answers(ALIKE, ALIKE | other, ALIKE) == [refused] * 3


def test_ranks_that_do_not_come_are_named_to_all_that_do() -> None:
    missing = (
        "RankError: ranks 1, 3: expected all 4 ranks within 1 s, found 2 of them; see what the "
        "missing ones printed, or give them longer (--timeout)"
    )
    assert answers(ALIKE, None, ALIKE, None) == [missing] * 2


def test_a_rank_that_cannot_begin_tells_all_others_why() -> None:
    """Also where its claims, which it could not make, are others."""
    why = "RankError: rank 2: expected every rank to begin, found no such file; see what it printed"
    assert answers(ALIKE, ALIKE, {}, failures=["", "", "no such file"]) == [why] * 3


def test_ranks_of_another_run_at_the_same_port_are_not_heard(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that a launcher without ports of its own starts at the same time on one machine."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    def store(rank: int, run: str, port: int) -> Any:
        launched = LaunchedRank(
            rank=rank, world_size=2, local_rank=rank, local_world_size=2, node=0,
            launcher="mpirun", address="127.0.0.1", port=port,
        )
        return store_of(launched, run, timeout_s=60)

    own = store(0, "results/a", 0)
    own.set("zreal/rank/0", "")
    port = own.underlying_store.port
    heard = [store(1, run, port).check(["zreal/rank/0"]) for run in ("results/a", "results/b")]
    assert heard == [True, False]
