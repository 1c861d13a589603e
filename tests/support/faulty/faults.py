"""Faults of one rank of a real run, injected at a collective as torch issues it.

A fault replaces nothing of the product: the rank runs its scenario on gloo until the collective
number `at`, and fails there as programs do. `faulty_rank` goes under zreal.processes.launch in
place of zreal.rank.run.launched_rank; `inject` serves ranks of any launcher.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zreal.meters.collectives import CollectiveRecorder
from zreal.processes.rendezvous import rendezvous
from zreal.rank import run as rank_run

Recorder = CollectiveRecorder
FULL_DISK = "full disk"
SMALL_FILE = 4096
"""Bytes that a file may have on a disk that is full: the end of a log, and no result."""
NEVER_S = 3600.0
"""Seconds that a hanging rank sleeps: longer than any limit of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of `rank` at the collective number `at`; the moment goes to the file `stamp`."""

    kind: str
    rank: int
    at: int = 5
    stamp: str = ""

    def table(self) -> dict[str, Any]:
        """The fault as JSON can say it."""
        return asdict(self)


def faulty_rank(arguments: dict[str, Any], *, rank: int, **more: Any) -> dict[str, Any]:
    """A real gloo rank with the fault `arguments["fault"]`."""
    inject(Fault(**arguments["fault"]), rank)
    return rank_run.launched_rank(arguments, rank=rank, **more)


def connected_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **more: Any
) -> float:
    """A rank that does no more than meet the others over gloo: the sum of their numbers."""
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    numbers = torch.tensor([float(rank)])
    dist.all_reduce(numbers)
    dist.destroy_process_group()
    return float(numbers)


def inject(fault: Fault, rank: int) -> None:
    """Let this process fail at its collective number `fault.at`, if it is the rank to fail."""
    if rank != fault.rank:
        return
    dispatch, record = Recorder.__torch_dispatch__, Recorder._record
    has_failed = False

    def is_due(recorder: Recorder, name: str) -> bool:
        nonlocal has_failed
        due = recorder._issued == fault.at and name.startswith(("c10d::", "_c10d_functional::"))
        if due and not has_failed:
            has_failed = True
            if fault.stamp:
                Path(fault.stamp).write_text(repr(time.time()))
            return True
        return False

    def dispatch_with_fault(
        recorder: Recorder, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if fault.kind == "other op" and is_due(recorder, func.name()):
            with recorder:  # which sees nothing while it handles an op
                other_op()
        if fault.kind in CHANGES and is_due(recorder, func.name()):
            args = changed(args, CHANGES[fault.kind])
        return dispatch(recorder, func, types, args, kwargs)

    def record_with_fault(recorder: Recorder, name: str, arguments: tuple[Any, ...]) -> None:
        if fault.kind == FULL_DISK and is_due(recorder, name):
            full_disk()
        if fault.kind in ENDS and is_due(recorder, name):
            if fault.kind in INSIDE:
                record(recorder, name, arguments)
            ENDS[fault.kind]()
        record(recorder, name, arguments)

    setattr(Recorder, "__torch_dispatch__", dispatch_with_fault)  # noqa: B010  mypy
    setattr(Recorder, "_record", record_with_fault)  # noqa: B010  mypy


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The arguments of a collective with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(changed(item, change) for item in value)
    return value


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raised() -> None:
    raise ValueError("a wrong shard")


def exited() -> None:
    os._exit(3)


def left() -> None:
    sys.exit(3)


def asleep() -> None:
    time.sleep(NEVER_S)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_op() -> None:
    """An all-reduce that no other rank enters, as after a condition on the rank."""
    dist.all_reduce(torch.zeros(8))


def out_of_memory() -> None:
    """torch's own allocator is refused memory by the system."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.zeros(2**28)


def full_disk() -> None:
    """No result of this process can be written any more, as on a full disk; it goes on."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))


ENDS: dict[str, Callable[[], None]] = {
    "SIGKILL": killed,
    "exception": raised,
    "exit(3)": exited,
    "sys.exit(3)": left,
    "hang before": asleep,
    "hang inside": asleep,
    "stopped": stopped,
    "out of memory": out_of_memory,
}
"""Ends of a rank in place of its collective, by kind of fault."""
INSIDE = ("hang inside", "stopped")
"""Faults after the rank has announced the collective."""
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other shape": lambda tensor: torch.cat([tensor, tensor]),
    "other dtype": torch.Tensor.double,
}
"""Tensors with which a rank enters its collective, by kind of fault."""
