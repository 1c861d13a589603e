"""What the header of an nccl-tests run says of its ranks and launches, as text and as JSON have it:
whether all ranks are listed, and how collectives were launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OF_HOST = "times of the host (-C 1), not of the collective"
BLOCKING = (
    "blocking launches (-z 1): times with the host's launch and wait of each collective, not of "
    "the collective"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Threads of each process and GPUs of each thread, collectives of one launch, and launches of a
    CUDA graph, and whether the host waits for each launch; what is not said is one of each, no
    graph and no waiting."""

    threads: int = 1
    gpus: int = 1
    grouped: int = 1
    graphs: int = 0
    is_blocking: bool = False

    @property
    def mistimed(self) -> str:
        """Why its times are not those of the collective, "" where they are."""
        return BLOCKING if self.is_blocking else ""

    def incomplete(self, ranks: Sequence[int]) -> str:
        """Why a list of ranks is not that of all of them, "" where it may be: they count from 0,
        and each process has as many GPUs."""
        listed = sorted(set(ranks))
        missing = next((place for place, rank in enumerate(listed) if rank != place), None)
        if missing is not None:
            return f"devices of {len(ranks)} ranks are listed, and none of rank {missing}"
        if len(listed) < len(ranks):
            return f"devices of {len(ranks)} ranks are listed, some of them twice"
        each = self.threads * self.gpus
        if each and len(ranks) % each:
            return (
                f"devices of {len(ranks)} ranks are listed, where each process has {each} (nThread "
                f"{self.threads}, nGpus {self.gpus})"
            )
        return ""

    @property
    def assumed(self) -> tuple[str, ...]:
        """What of its launches is taken to change nothing, in words: a graph, or a group, saves the
        host's part of each."""
        graphs = (
            f"launched as CUDA graphs (graph: {self.graphs}), taken for collectives launched one "
            f"by one"
        )
        grouped = (
            f"{self.grouped} collectives in one launch (agg iters: {self.grouped}), taken for "
            f"collectives launched one by one"
        )
        return (*((graphs,) if self.graphs > 0 else ()), *((grouped,) if self.grouped > 1 else ()))


def split(groups: Iterable[object]) -> str:
    """Why ranks of these groups, one for each rank, ran in a way that there is no model of, ""
    where all are of one."""
    count = len(set(groups))
    return (
        f"{count} communicators at once (NCCL_TESTS_SPLIT): no model of what they take from one "
        f"another"
        if count > 1
        else ""
    )


_TEXT = {"threads": "nThread", "gpus": "nGpus", "grouped": "agg iters:", "graphs": "graph:"}
_JSON = {
    "threads": "nthreads", "gpus": "ngpus", "grouped": "aggregated_iterations", "graphs": "graph"
}


def of_text(log: str) -> Header:
    """The header of one run as its line has it (writeDeviceReport in nccl-tests' src)."""
    line = re.search(r"^#\s*nThread\b.*$", log, re.MULTILINE)
    found = (
        {name: re.search(rf"\b{words}\s+(\d{{1,9}})\b", line[0]) for name, words in _TEXT.items()}
        if line
        else {}
    )
    is_blocking = re.search(r"^#\s*Blocking Enabled\b", log, re.MULTILINE) is not None
    return Header(
        **{name: int(said[1]) for name, said in found.items() if said}, is_blocking=is_blocking
    )


def of_json(config: Mapping[str, Any]) -> Header:
    """The header as the object `config` has it, in which nccl-tests writes truth as a word."""
    is_blocking = str(config.get("blocking_collectives", "")).lower() not in (
        "", "false", "0", "none"
    )
    return Header(
        **{name: config[key] for name, key in _JSON.items() if type(config.get(key)) is int},
        is_blocking=is_blocking,
    )


def mixed(gpus: Iterable[str]) -> str:
    """Why devices are no one kind of GPU, "" where they are: a ring is as fast as the slowest, and
    nobody knows which the row is of."""
    kinds = sorted(set(gpus))
    return f"GPUs contradict each other: {', '.join(kinds)[:100]}" if len(kinds) > 1 else ""


def version(code: int) -> str:
    """NCCL's number as people write it: 22707 is 2.27.7, and before 2.9 2804 was 2.8.4."""
    unit = 10_000 if code >= 10_000 else 1000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"
