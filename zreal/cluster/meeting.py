"""The meeting of ranks at a store, before their first collective: all there, and of one scenario.

Rank 0 reads every rank's claims and writes one answer for all: requests grow with the number of
ranks, and not with its square.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zreal.cluster.launcher import LaunchedRank, LauncherError
from zsim.errors import RankError

POLL_S, CONNECT_S = 0.02, 0.2
READ_S = 10.0
"""Seconds that rank 0 keeps the store after a refusal, for all ranks to read it."""
MOST_NAMED = 20
"""Most ranks that a message lists."""
ANSWER, READ = "zreal/answer", "zreal/read"

Claims = Mapping[str, str]
"""Facts that must be alike on all ranks, by name: the scenario's fingerprint, versions."""


def store_of(launched: LaunchedRank, run: str, *, timeout_s: float) -> Any:
    """The store at rank 0's address, which rank 0 keeps unless torchrun does; RankError where no
    connection is made in time.

    `run` is the same text on all ranks of a run. Those of another run at the same port then never
    hear of this one's.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps_it = launched.rank == 0 and not agent
    try:
        if not keeps_it:
            _wait_for(launched.address, launched.port, timeout_s)
        store = dist.TCPStore(
            launched.address, launched.port, launched.world_size, is_master=keeps_it,
            timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        first_line = str(error).partition("\n")[0][:200]
        raise RankError(
            where=f"rank {launched.rank}",
            expected=f"the store of rank 0 at {launched.address}:{launched.port}",
            found=f"{type(error).__name__}: {first_line}",
            remedy="set MASTER_ADDR to a host that all nodes reach, and MASTER_PORT to a free port",
        ) from None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"{restarts}/{run}", store)


def _wait_for(address: str, port: int, timeout_s: float) -> None:
    """Return once a process listens there; OSError when none has within the time.

    torch's own client pauses for as long as the timeout between two tries.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(CONNECT_S)
        else:
            return


def meet(
    store: Any, launched: LaunchedRank, claims: Claims, wish: str, *, timeout_s: float,
    failure: str = "",
) -> list[str]:
    """Every rank's `wish`, by rank, once all are there with the same `claims`.

    `failure`: the reason for which this rank cannot take part, told to all.

    LauncherError on every rank where claims differ; RankError where ranks are missing after
    `timeout_s`, or where one has a failure.
    """
    own = json.dumps({"claims": dict(claims), "wish": wish, "failure": failure})
    store.set(f"zreal/rank/{launched.rank}", own)
    if launched.rank == 0:
        answer = _answer(store, launched.world_size, timeout_s=timeout_s)
        store.set(ANSWER, json.dumps(answer))
    elif not _arrives(store, ANSWER, timeout_s + READ_S):
        raise RankError(
            where=f"rank {launched.rank}", expected="an answer of rank 0",
            found=f"none in {timeout_s:g} s", remedy="see what rank 0 printed",
        )
    answer = json.loads(store.get(ANSWER))
    if isinstance(answer, list):
        return answer
    store.add(READ, 1)
    deadline = time.monotonic() + READ_S
    while launched.rank == 0 and store.add(READ, 0) < answer["present"]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    kind = LauncherError if answer["differs"] else RankError
    raise kind(**{key: answer[key] for key in ("where", "expected", "found", "remedy")})


def _arrives(store: Any, key: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _answer(store: Any, world_size: int, *, timeout_s: float) -> list[str] | dict[str, Any]:
    """Wishes by rank, or an error's parts and how many ranks are there to read them."""
    deadline, waiting = time.monotonic() + timeout_s, set(range(world_size))
    while waiting and time.monotonic() < deadline:
        waiting = {rank for rank in waiting if not store.check([f"zreal/rank/{rank}"])}
        time.sleep(POLL_S if waiting else 0.0)
    present = world_size - len(waiting)
    if waiting:
        return {
            "where": _named(waiting), "expected": f"all {world_size} ranks within {timeout_s:g} s",
            "found": f"{present} of them", "differs": False, "present": present,
            "remedy": "see what the missing ones printed, or give them longer (--timeout)",
        }
    answers = [json.loads(store.get(f"zreal/rank/{rank}")) for rank in range(world_size)]
    if failed := {rank: own["failure"] for rank, own in enumerate(answers) if own["failure"]}:
        return {
            "where": _named(failed), "expected": "every rank to begin",
            "found": next(iter(failed.values())), "differs": False, "present": present,
            "remedy": "see what it printed",
        }
    expected = answers[0]["claims"]
    for name, value in expected.items():
        others = {rank: own["claims"].get(name, "none") for rank, own in enumerate(answers)}
        differing = [rank for rank, other in others.items() if other != value]
        if differing:
            return {
                "where": _named(differing), "expected": f"the {name} of rank 0, {value}",
                "found": others[differing[0]], "differs": True, "present": present,
                "remedy": "start every rank with the same files and the same installation; a "
                          "module must not depend on its rank",
            }
    return [own["wish"] for own in answers]


def _named(ranks: Any) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    names = ", ".join(map(str, listed[:MOST_NAMED]))
    return f"rank{'s' if len(listed) > 1 else ''} {names}{more}"
