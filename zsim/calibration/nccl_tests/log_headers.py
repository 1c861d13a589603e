"""The header of an nccl-tests run, of text and of JSON: its ranks, and its launches of collectives.
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
    """Threads of each process, GPUs of each thread, collectives of one launch, launches of a CUDA
    graph.

    `is_blocking` where the host waits for each launch. What a log leaves out is one of each, no
    graph and no waiting.
    """

    threads: int = 1
    gpus: int = 1
    grouped: int = 1
    graphs: int = 0
    is_blocking: bool = False

    @property
    def mistimed(self) -> str:
        """The reason why its times are not those of the collective, "" where they are."""
        return BLOCKING if self.is_blocking else ""

    def incomplete(self, ranks: Sequence[int]) -> str:
        """The reason why `ranks` are not all ranks of the run, "" where they may be.

        Ranks count from 0, and each process has as many GPUs.
        """
        listed = sorted(set(ranks))
        missing = next((expected for expected, rank in enumerate(listed) if rank != expected), None)
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
        """Texts of caveats: a CUDA graph, or several collectives in a launch, save host time for
        each, which is neglected."""
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
    """The reason why ranks of these groups, by rank, have no model, "" where all are of one."""
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
    matches = (
        {name: re.search(rf"\b{label}\s+(\d{{1,9}})\b", line[0]) for name, label in _TEXT.items()}
        if line
        else {}
    )
    is_blocking = re.search(r"^#\s*Blocking Enabled\b", log, re.MULTILINE) is not None
    return Header(
        **{name: int(match[1]) for name, match in matches.items() if match}, is_blocking=is_blocking
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
    """The reason why devices are not one kind of GPU, "" where they are.

    A ring is as fast as its slowest GPU, which the log does not name.
    """
    kinds = sorted(set(gpus))
    return f"GPUs contradict each other: {', '.join(kinds)[:100]}" if len(kinds) > 1 else ""


def version(code: int) -> str:
    """NCCL's number as people write it: 22707 is 2.27.7, and before 2.9 2804 was 2.8.4."""
    unit = 10_000 if code >= 10_000 else 1000
    return f"{code // unit}.{code % unit // 100}.{code % 100}"
