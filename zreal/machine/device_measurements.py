"""The measurements of one rank's device: single kernels, and collectives over all ranks.

A call is timed as a simulator predicts it, alone on the device with the host ahead. So a long
kernel runs first on a GPU, behind which the host issues all calls of a turn. CUDA events have the
time on the device, the host's clock that of issuing. On a CPU both are the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from zreal.processes.rank_device import start_group, take_device, tell_hosts_apart
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zreal.rank.run import RENDEZVOUS_S
from zsim.ir.ops import ATTENTION_BACKWARD, Kernel, is_attention

WARMUP = 2
TURN_NS = 2_000_000
"""Calls of a turn fill so long, of short ones at most `MOST_CALLS`."""
MOST_CALLS = 64
"""Calls that the host issues behind the long kernel. CUDA queues about 1,024 launches, and a call
may be several."""
LEAST_TURNS, MOST_TURNS = 3, 30
ISSUE_NS = 50_000
"""Nanoseconds in which any host has issued a call; the long kernel lasts as long for each."""
BLOCK = 4096
"""Rows and columns of the product that the long kernel is."""
COLUMNS, WORDS = 4096, 65_536
"""Length of rows that element-wise kernels work on, and of those of a loss: a vocabulary."""

Call = Callable[[], object]


class CpuClock:
    """Times of calls on a CPU, whose host runs each kernel itself."""

    device = torch.device("cpu")

    def turn(self, call: Call, count: int) -> tuple[int, int]:
        """Nanoseconds of one of `count` calls on the device, and of the host to issue it."""
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        each = (time.perf_counter_ns() - start) // count
        return each, each

    def sdpa(self) -> AbstractContextManager[None]:
        """Attention by the kernels that torch chooses."""
        return nullcontext()


class CudaClock:
    """Times of calls on a GPU, which all run behind a long kernel while the host issues them."""

    def __init__(self, rank: int) -> None:
        tell_hosts_apart(rank)
        self.device = take_device("cuda", local_rank=rank)
        self._factor = torch.ones(BLOCK, BLOCK, dtype=torch.bfloat16, device=self.device)
        for _ in range(WARMUP):
            self._long_ns = self._between(lambda: self._block(1))[0]

    def _block(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._factor, self._factor)

    def _between(self, issue: Callable[[], None]) -> tuple[int, int]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter_ns()
        issue()
        issued = time.perf_counter_ns() - start
        end.record()
        end.synchronize()
        return max(1, round(1e6 * begin.elapsed_time(end))), issued

    def turn(self, call: Call, count: int) -> tuple[int, int]:
        """Nanoseconds of one of `count` calls on the device, and of the host to issue it."""

        def issue() -> None:
            for _ in range(count):
                call()

        torch.cuda.synchronize()
        self._block(min(MOST_CALLS, 1 + count * ISSUE_NS // self._long_ns))
        lasted, issued = self._between(issue)
        return max(1, lasted // count), issued // count

    def sdpa(self) -> AbstractContextManager[None]:
        """Attention by FlashAttention's kernels, the ones that a scenario calls flash2."""
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


Clock = CpuClock | CudaClock


def measured_device(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None],
) -> dict[str, Any]:
    """Nanoseconds of this rank under "kernels" and "collectives", each with "device" and "issue" in
    the order of the request.

    Arguments: `kernels` as tables of Kernel, `collectives` as [kind, bytes], `budget_s` of each,
    `timeout_s`, `backend` of the process group, `device`.
    """
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    clock: Clock = CudaClock(rank) if arguments["device"] == "cuda" else CpuClock()
    start_group(
        arguments["backend"], store=store, rank=rank, world_size=world_size, device=clock.device,
        timeout=timedelta(seconds=RENDEZVOUS_S + arguments["timeout_s"]),
    )
    kernels = [
        Kernel(**{**table, "shape": tuple(table["shape"])}) for table in arguments["kernels"]
    ]
    measured: dict[str, dict[str, list[list[int]]]] = {
        "kernels": {"device": [], "issue": []}, "collectives": {"device": [], "issue": []},
    }
    calls = [("kernels", partial(_kernel_call, kernel, clock)) for kernel in kernels] + [
        ("collectives", partial(_collective_call, kind, nbytes, clock.device, world_size))
        for kind, nbytes in arguments["collectives"]
    ]
    for index, (name, made) in enumerate(calls):
        progress(f"measurement {index + 1} of {len(calls)}")
        turns = _turns(made(), clock, budget_ns=1e9 * arguments["budget_s"])
        for part, times in zip(("device", "issue"), zip(*turns, strict=True), strict=True):
            measured[name][part].append(list(times))
    dist.barrier()
    dist.destroy_process_group()
    return measured


def _turns(call: Call, clock: Clock, *, budget_ns: float) -> list[tuple[int, int]]:
    """Turns of `call` within the budget; all ranks have as many, or a collective would hang."""
    for _ in range(WARMUP):
        first = clock.turn(call, 1)[0]
    slowest = torch.tensor(float(max(1, first)), device=clock.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    each = float(slowest)
    count = round(max(1, min(MOST_CALLS, TURN_NS // each)))
    turns = round(max(LEAST_TURNS, min(MOST_TURNS, budget_ns // (count * (each + ISSUE_NS)))))
    return [clock.turn(call, count) for _ in range(turns)]


def _kernel_call(kernel: Kernel, clock: Clock) -> Call:
    """The call of torch that is `kernel`, on tensors of its shape or of its bytes."""
    dtype = getattr(torch, kernel.dtype)
    # equal numbers take less power, and a GPU's clocks are higher then
    tensor = partial(torch.randn, dtype=dtype, device=clock.device)
    if is_attention(kernel.operator):
        return _attention_call(kernel, clock, tensor)
    if kernel.shape:
        _, m, n, k = kernel.shape
        return partial(F.linear, tensor(m, k), tensor(n, k))
    if kernel.location == "link":
        pinned = clock.device.type == "cuda"
        host = torch.ones(kernel.nbytes // dtype.itemsize, dtype=dtype, pin_memory=pinned)
        device = torch.ones_like(host, device=clock.device)
        pair = (device, host) if kernel.operator == "to_device" else (host, device)
        return partial(pair[0].copy_, pair[1], non_blocking=True)
    return _plain_call(kernel, tensor)


def _attention_call(kernel: Kernel, clock: Clock, tensor: Callable[..., torch.Tensor]) -> Call:
    heads, queries, keys, width = kernel.shape
    backward = kernel.operator == ATTENTION_BACKWARD
    q, k, v = (
        tensor(1, heads, length, width, requires_grad=backward) for length in (queries, keys, keys)
    )

    def forward() -> torch.Tensor:
        with clock.sdpa():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return forward
    output = forward()
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)


def _plain_call(kernel: Kernel, tensor: Callable[..., torch.Tensor]) -> Call:
    """A kernel that reads and writes rows of `COLUMNS`, or fewer numbers than one row has."""
    tensors = {"add": 3, "log_softmax": 4}.get(kernel.operator, 2)
    numel = max(1, kernel.nbytes // tensors // getattr(torch, kernel.dtype).itemsize)
    columns = WORDS if kernel.operator == "log_softmax" else COLUMNS
    shape = (max(1, numel // columns), min(numel, columns))
    first = tensor(*shape)
    calls: dict[str, Callable[[], Call]] = {
        "copy": lambda: partial(torch.empty_like(first).copy_, first),
        "add": lambda: partial(torch.add, first, tensor(*shape), out=torch.empty_like(first)),
        "gelu": lambda: partial(F.gelu, first),
        "layer_norm": lambda: partial(F.layer_norm, first, shape[1:]),
        "log_softmax": lambda: partial(F.log_softmax, first, 1),
        # as in training, where the host records each operator for backward
        "scale": lambda: partial(torch.mul, tensor(*shape, requires_grad=True), 2.0),
    }
    return calls[kernel.operator]()


def _collective_call(kind: str, nbytes: int, device: torch.device, size: int) -> Call:
    """A collective of all ranks with a full message of `nbytes`, out of place where torch can."""
    numel = max(1, nbytes // torch.bfloat16.itemsize // size)
    full, shard = (
        torch.zeros(length, dtype=torch.bfloat16, device=device) for length in (numel * size, numel)
    )
    calls: dict[str, Call] = {
        "all_gather": partial(dist.all_gather_into_tensor, full, shard),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, shard, full),
        "all_reduce": partial(dist.all_reduce, full),
        "broadcast": partial(dist.broadcast, full, 0),
    }
    return calls[kind]
