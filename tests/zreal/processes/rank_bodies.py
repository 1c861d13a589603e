"""Bodies of the launch tests' ranks; each takes the arguments that zreal.processes.launch gives a
rank."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zreal import torch_private
from zreal.executor import flat_rank, rank_optimizer
from zreal.executor.flat_rank import FlatRank
from zreal.meters.memory import MemoryMeter
from zreal.processes.rank_folder import make_folder
from zreal.processes.rank_status import REFERENCE
from zreal.rank import run as rank_run
from zsim.ir.ops import Op
from zsim.models.training_options import Optimizer

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


def wait_to_be_ended() -> None:
    """Sleep for longer than any limit of a launch or of the suite."""
    time.sleep(3600)


def fine(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> dict[str, int]:
    """Return who this is."""
    return {"rank": rank, "world_size": world_size, "given": arguments["given"]}


def killed(_: object, *, rank: int, progress: Say, **more: object) -> None:
    """Rank 1 is killed inside its second collective while the others wait for it."""
    progress("reduce_scatter #1 of 64 B over dp_shard")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_to_be_ended()


def killed_with_files(arguments: dict[str, Any], *, rank: int, **more: object) -> None:
    """Rank 1 is killed, and the other is to be ended, while each has a folder, whose name it writes
    into the one given."""
    folder = make_folder()
    (folder / "states").write_bytes(bytes(8))
    names = Path(arguments["names"])
    (names / f".{rank}").write_text(str(folder))
    (names / f".{rank}").rename(names / str(rank))
    if rank == 1:
        while not (names / "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_to_be_ended()


def raising(_: object, *, rank: int, progress: Say, **more: object) -> None:
    """Rank 1 raises while the others wait for it."""
    progress("all_gather #7 of 128 B over dp_shard")
    if rank == 1:
        raise ValueError("a wrong shard")
    wait_to_be_ended()


def absent(_: object, *, rank: int, progress: Say, **more: object) -> None:
    """Rank 2 never arrives at the collective that the others are in."""
    progress("all_reduce #3 of 8 B over world" if rank == 2 else "all_reduce #4 of 8 B over world")
    wait_to_be_ended()


def alone(_: object, *, progress: Say, **more: object) -> None:
    """Every rank is past its last collective, and trains the reference by itself."""
    progress("all_reduce #9 of 8 B over world")
    progress(REFERENCE)
    wait_to_be_ended()


def stopped(arguments: dict[str, Any], *, rank: int, progress: Say, **more: object) -> None:
    """Rank 2, or each of those given, announces the collective that the others are in, and is
    stopped before it enters it."""
    progress("all_reduce #4 of 8 B over world")
    if rank in arguments.get("ranks", [2]):
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_to_be_ended()


def slow(_: object, *, progress: Say, **more: object) -> None:
    """Ranks enter one collective after another, and are not done in time."""
    for number in count():
        progress(f"all_reduce #{number} of 8 B over world")
        time.sleep(0.1)


def ending_the_server(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> None:
    """Rank 0 sends the fork server a signal, and ends if the server is stopped."""
    progress("all_reduce #4 of 8 B over world")
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    store.set(f"rank {rank}", "has said it")
    if rank == 0:
        store.wait(["rank 1"])
        os.kill(os.getppid(), arguments["signal"])
        if arguments["signal"] == signal.SIGSTOP:
            os._exit(0)
    wait_to_be_ended()


def all_waiting(_: object, *, progress: Say, **more: object) -> None:
    """Every rank announces the same collective, and nothing more happens."""
    progress("all_reduce #4 of 8 B over world")
    wait_to_be_ended()


def silent(_: object, **more: object) -> None:
    """No rank says anything."""
    wait_to_be_ended()


def failing_in_the_first_step(
    arguments: dict[str, Any], *, rank: int, progress: Say, **more: Any
) -> dict[str, Any]:
    """A real gloo rank; rank 1 is killed, raises or stays away, as `how` says, before its third
    collective of the first step."""
    entered = 0

    def say(text: str) -> None:
        nonlocal entered
        entered += 1
        if rank == 1 and entered == 3:
            fail(arguments["how"])
        progress(text)

    return rank_run.launched_rank(arguments, rank=rank, progress=say, **more)


def late(
    arguments: dict[str, Any], *, rank: int, progress: Say, **more: Any
) -> dict[str, Any]:
    """A real gloo rank; rank 1 enters each collective long after rank 0."""

    def say(text: str) -> None:
        if rank == 1:
            time.sleep(0.03)
        progress(text)

    return rank_run.launched_rank(arguments, rank=rank, progress=say, **more)


def fail(how: str) -> None:
    """End this rank in one of the ways in which ranks end."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raised":
        raise ValueError("a wrong shard")
    wait_to_be_ended()


def with_half_gradients(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """One of four gloo ranks of our zero3 whose backward begins with half of what it should."""
    FlatRank.gradient_scale = property(lambda _: 0.125)
    return rank_run.launched_rank(arguments, **more)


def reduced_both_ways(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> dict[str, Any]:
    """All-reduce against reduce-scatter and all-gather of the same random numbers, for each of
    `numels`."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    equal, sums = [], 0.0
    for numel in arguments["numels"]:
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(100 * numel + rank))
        whole = mine.clone()
        dist.all_reduce(whole)
        shard, joined = torch.empty(numel // world_size), torch.empty(numel)
        torch_private.reduce_scatter(shard, mine, group=dist.group.WORLD)
        torch_private.all_gather(joined, shard, group=dist.group.WORLD)
        equal.append(bool(torch.equal(whole, joined)))
        sums += float(whole.abs().sum())
    dist.destroy_process_group()
    return {"equal": equal, "nonzero": sums > 0}


def scratch_of_collectives(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> dict[str, list[int]]:
    """Bytes, by collective, that a meter keeps apart as scratch."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not None
    shard, whole = torch.ones(arguments["numel"]), torch.ones(arguments["numel"] * world_size)
    calls = {
        "all_gather": lambda group: torch_private.all_gather(whole, shard, group=group),
        "reduce_scatter": lambda group: torch_private.reduce_scatter(shard, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, src=0, group=group),
    }
    seen: dict[str, list[int]] = {}
    for name, call in calls.items():
        meter = MemoryMeter()
        with meter:
            call(dist.group.WORLD)
        seen[name] = meter.scratch
    dist.destroy_process_group()
    return seen


def sending_more(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> None:
    """Rank 0 sends more than it should, and gets on; rank 1 ends for it, as `how` says."""
    progress(f"all_gather #0 of {64 if rank else 128} B over dp_shard")
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    if rank == 0:
        progress("reduce_scatter #1 of 64 B over dp_shard")
        store.set("sent", "")
        wait_to_be_ended()
    store.wait(["sent"])
    if arguments["how"] == "raised in torch":
        dist.broadcast_object_list([], src=0)
    if arguments["how"] == "raised":
        raise ValueError("a wrong shard")
    os.abort()


def announced(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, progress: Say, keep: Keep
) -> list[str]:
    """All that a real gloo rank announces."""
    told: list[str] = []
    rank_run.launched_rank(
        arguments, rank=rank, world_size=world_size, port=port, progress=told.append, keep=keep
    )
    return told


def unspeakable(_: object, **more: object) -> object:
    """A result that JSON cannot say."""
    return object()


def killed_by(arguments: dict[str, Any], **more: object) -> None:
    """End by the signal `number`."""
    os.kill(os.getpid(), arguments["number"])
    wait_to_be_ended()


def half_sent(_: object, *, rank: int, **more: object) -> str:
    """Rank 1 stops in the middle of sending its result."""
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        written = write(descriptor, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)
        return written

    if rank == 1:
        os.write = half  # type: ignore[assignment]
    return "a result"


def raising_at_length(arguments: dict[str, Any], *, rank: int, **more: object) -> None:
    """Rank 1 raises an error of several lines; the others end by a signal once the controller has
    heard of it, as its consequence."""
    if rank == 1:
        raise RuntimeError("the real cause\nException raised from foo\nframe #1: 0xdead")
    while not Path(arguments["heard"]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGABRT)


def deaf(_: object, *, progress: Say, **more: object) -> None:
    """Ignore the request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    progress("all_reduce #0 of 8 B over world")
    wait_to_be_ended()


def raising_alone(_: object, *, rank: int, **more: object) -> None:
    """Rank 1 raises, and the others never notice."""
    if rank == 1:
        raise ValueError("alone")
    wait_to_be_ended()


def with_defect(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A real gloo rank of our own engine with the defect that is named."""
    DEFECTS[arguments["defect"]](setattr)
    return rank_run.launched_rank(arguments, **more)


Seed = Callable[[Any, str, Any], None]


def missing_free(seed: Seed) -> None:
    """The parameters of blocks.1 stay gathered."""
    free = flat_rank.FlatRank._free

    def some(self: flat_rank.FlatRank, op: Op) -> None:
        if not (
            op.unit.endswith(".1")
            and any(event.buffer.endswith(":unsharded") for event in op.memory)
        ):
            free(self, op)

    seed(flat_rank.FlatRank, "_free", some)


def leak(seed: Seed) -> None:
    """Every step of the optimizer leaves 2,400 bytes behind."""
    step = flat_rank.FlatRank._step

    def leaving(self: flat_rank.FlatRank) -> None:
        step(self)
        self.buffers.live[f"leak {len(self.buffers.live)}"] = torch.zeros(600)

    seed(flat_rank.FlatRank, "_step", leaving)


def eager_optimizer(seed: Seed) -> None:
    """The learning rate is 15 % too high."""
    make = rank_optimizer.make_optimizer

    def faster(settings: Optimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        return make(replace(settings, learning_rate=1.15 * settings.learning_rate), parameters)

    seed(rank_optimizer, "make_optimizer", faster)


def rounded_master(seed: Seed) -> None:
    """The master copy is taken from parameters that are rounded already."""
    flatten = flat_rank.FlatRank._flatten

    def rounding(self: flat_rank.FlatRank, op: Op) -> None:
        flatten(self, op)
        self.optimizer.stepped[op.unit].copy_(self.buffers.shard(op.unit))

    seed(flat_rank.FlatRank, "_flatten", rounding)


DEFECTS: dict[str, Callable[[Seed], None]] = {
    "missing free": missing_free,
    "leak": leak,
    "eager optimizer": eager_optimizer,
    "rounded master": rounded_master,
}


def parent(arguments: dict[str, Any], *, rank: int, world_size: int, **more: object) -> None:
    """Each rank starts a process of its own and writes down its number; then one rank fails."""
    child = subprocess.Popen(["sleep", "300"])
    Path(arguments["folder"], str(child.pid)).touch()
    while len(os.listdir(arguments["folder"])) < world_size:
        time.sleep(0.05)
    if rank == 1:
        raise ValueError("over")
    wait_to_be_ended()
