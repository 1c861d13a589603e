"""The measurements of one rank: steps whose collectives move nothing, and collectives alone.

All ranks measure at once, since ranks of a run share the machine's cores, caches and memory too.
Steps run torch's own strategies, or our executor, on the fake process group. They have the host's
whole cost of hooks and collectives, and nothing of the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist

from zreal import torch_private
from zreal.executor.executor import execute
from zreal.meters.measured_step import TrainedRank
from zreal.observer.observer import observe
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zreal.rank.run import RENDEZVOUS_S, interpreter_of
from zsim.calibration.machine.machine_load import Window
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

WARMUP = 2
PARTS = (0.5, 0.6, 1.0)
"""Shares of the budget after which steps, products and collectives should be over."""
LEAST_TURNS, LEAST_CALLS = 2, 5
"""Repetitions of a step or product, and of a collective, that are made however late it is."""
PRODUCT_REPEATS = 5
TURN_NS = 20_000_000
"""Steps and products are repeated for so long: ranks that share a core take turns of some 4 ms."""
Meeting = Callable[[int], bool]
"""Waits for all ranks before a turn; False where it is too late for another."""
DTYPE = torch.float32
SQUARE = torch.ones(64, 64)
BESIDE_PRODUCTS = 1000
"""Products of two `SQUARE`s, of some 8 ms: several times what the collective beside them takes."""


def measured_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None],
) -> dict[str, Any]:
    """Nanoseconds of this rank: under "steps" a list by scenario, under the other names of the
    arguments a list by request. An attention has one of forward and one of backward.

    Arguments: `scenarios` as TOML texts, `collectives` as [kind, bytes, ranks, stride, repeats,
    ns of compute before, whether beside compute, ns between arrivals], `products` as [m, n, k],
    `attentions` as [batch, heads, tokens, width], `repeats` of steps. Repetitions get fewer where
    they would end later than `budget_s` after `begun`, on the machine's clock. A collective has
    its start and its end, on the clock that ranks share. Under "load" are the nanoseconds of a
    machine_load.Load, or null.
    """
    settle()
    window = Window()
    steps_end, products_end, end = (
        arguments["begun"] + part * arguments["budget_s"] for part in PARTS
    )
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    timeout = timedelta(seconds=RENDEZVOUS_S + arguments["timeout_s"])
    meet = partial(_meet, store, world_size, timeout)
    steps = []
    for index, text in enumerate(arguments["scenarios"]):
        scenario = parse(text.encode(), where=f"step{index}.toml")
        progress(f"step {index + 1} of {len(arguments['scenarios'])}")
        steps.append(
            _step_times(
                scenario, rank=rank, repeats=arguments["repeats"],
                meet=partial(
                    meet, f"step{index}", _until(steps_end, len(arguments["scenarios"]) - index)
                ),
            )
        )
    products = [
        _product_times(m, n, k, meet=partial(meet, f"product{index}", products_end))
        for index, (m, n, k) in enumerate(arguments["products"])
    ]
    attentions = [
        times
        for index, shape in enumerate(arguments["attentions"])
        for times in _attention_times(
            shape, meets=[
                partial(meet, f"attention{index}-{part}", products_end) for part in range(2)
            ],
        )
    ]
    dist.init_process_group(
        arguments["backend"], store=dist.PrefixStore("collectives", store), rank=rank,
        world_size=world_size, timeout=timeout,
    )
    shapes = sorted({(size, stride) for _, _, size, stride, *_ in arguments["collectives"]})
    groups = {shape: _own_group(*shape, rank, world_size) for shape in shapes}
    requested, collectives, begin = arguments["collectives"], [], time.monotonic()
    for index, (kind, nbytes, size, stride, repeats, *how) in enumerate(requested):
        planned = begin + (end - begin) * index / len(requested)
        number = _agreed(min(repeats, LEAST_CALLS) if time.monotonic() > planned else repeats)
        collectives.append(
            _collective_times(kind, nbytes, groups[size, stride], size, number, *how)
        )
    load = window.load()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "load": load and [load.wall_ns, load.own_ns, load.machine_ns],
        "steps": steps, "collectives": collectives, "products": products,
        "attentions": attentions,
    }


def _until(end: float, number: int) -> float:
    """The time until which the first of `number` measurements may take, all until `end`."""
    now = time.monotonic()
    return now + (end - now) / number


def _agreed(number: int) -> int:
    """The number that rank 0 has."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, 0)
    return int(tensor.item())


def _meet(
    store: dist.TCPStore, world_size: int, timeout: timedelta, name: str, until: float, turn: int
) -> bool:
    """Wait until all ranks are at the same `turn` of `name`, by the store: there is no group.

    Returns False where the last rank came after the time `until`, beyond the least turns.
    """
    key = f"{name}/{turn}"
    if store.add(key, 1) == world_size:
        late = turn >= LEAST_TURNS and time.monotonic() > until
        store.set(f"{key}/all", "late" if late else "in time")
    store.wait([f"{key}/all"], timeout)
    return bool(store.get(f"{key}/all") == b"in time")


def _step_times(
    scenario: Scenario, *, rank: int, repeats: int, meet: Meeting
) -> list[int]:
    """Nanoseconds of a step that neither meter nor recorder watches, `repeats` times."""
    with torch_private.fake_group(rank=rank, world_size=scenario.world_size):
        step = _trained(scenario, rank).plain_step
        for _ in range(WARMUP):
            step()
        return _repeated(step, range(repeats), meet=meet)


def _trained(scenario: Scenario, rank: int) -> TrainedRank:
    if interpreter_of(scenario, None) == "observer":
        return observe(scenario, rank=rank)
    return execute(scenario, program=plan(scenario, device="cpu"), rank=rank)


def _product_times(m: int, n: int, k: int, *, meet: Meeting) -> list[int]:
    """Nanoseconds of the product of a linear layer, at most `PRODUCT_REPEATS` times."""
    rows, weight = torch.ones(m, k), torch.ones(n, k)
    product = partial(torch.nn.functional.linear, rows, weight)
    return _repeated(product, range(PRODUCT_REPEATS), meet=meet)


def _attention_times(shape: list[int], *, meets: list[Meeting]) -> list[list[int]]:
    """Nanoseconds of causal attention on tensors of that shape, at most `PRODUCT_REPEATS` times:
    forward, then backward."""
    query, key, value = (torch.randn(shape).requires_grad_() for _ in range(3))
    forward = partial(
        torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True
    )
    out = forward()
    backward = partial(
        torch.autograd.grad, out, (query, key, value), torch.ones_like(out), retain_graph=True
    )
    works: tuple[Callable[[], object], ...] = (forward, backward)
    return [
        _repeated(work, range(PRODUCT_REPEATS), meet=meet)
        for work, meet in zip(works, meets, strict=True)
    ]


def _repeated(work: Callable[[], object], turns: range, *, meet: Meeting) -> list[int]:
    """Nanoseconds of `work`, turn by turn on all ranks at once, until ranks meet late."""
    return [_mean_ns(work) for _ in takewhile(meet, turns)]


def _mean_ns(work: Callable[[], object]) -> int:
    """Nanoseconds of `work`: the mean of as many as fill `TURN_NS`."""
    start = now = time.perf_counter_ns()
    count = 0
    while now - start < TURN_NS:
        work()
        now, count = time.perf_counter_ns(), count + 1
    return (now - start) // count


def _compute(ns: int) -> None:
    """Keeps this rank's core at work for `ns`, as a step's compute does before a collective."""
    end = time.perf_counter_ns() + ns
    while time.perf_counter_ns() < end:
        torch.mm(SQUARE, SQUARE)


def _compute_fixed(products: int) -> None:
    for _ in range(products):
        torch.mm(SQUARE, SQUARE)


def _own_group(size: int, stride: int, rank: int, world_size: int) -> dist.ProcessGroup | None:
    """This rank's group, if any, among groups of `size` ranks that are `stride` apart, all of which
    communicate at once. Every rank makes every group."""
    blocks = range(0, world_size - size * stride + 1, size * stride)
    firsts = [block + first for block in blocks for first in range(stride)]
    own = None
    for first in firsts:
        ranks = list(range(first, first + size * stride, stride))
        group = dist.new_group(ranks)
        own = group if rank in ranks else own
    return own


def _collective_times(
    kind: str, nbytes: int, group: dist.ProcessGroup | None, size: int, repeats: int,
    computed_ns: int, beside: bool, apart_ns: int,
) -> list[tuple[int, int]]:
    """Start and end of each of `repeats` collectives with a full message of `nbytes`.

    Each comes after `computed_ns` of compute. `beside` gives 0 and what compute beside it loses.
    Ranks arrive `apart_ns` from one another, in turns.
    """
    if group is None:
        return []
    numel = max(1, nbytes // DTYPE.itemsize // size)
    full, shard = torch.ones(numel * size, dtype=DTYPE), torch.ones(numel, dtype=DTYPE)
    first = dist.get_process_group_ranks(group)[0]
    calls: dict[str, Callable[..., Any]] = {
        "all_gather": partial(torch_private.all_gather, full, shard, group=group),
        "reduce_scatter": partial(torch_private.reduce_scatter, shard, full, group=group),
        "all_reduce": partial(dist.all_reduce, full, group=group),
        "broadcast": partial(dist.broadcast, full, first, group=group),
    }
    call, rank = calls[kind], dist.get_rank(group)
    for _ in range(WARMUP):
        call()
    times = []
    for turn in range(repeats):
        dist.barrier(group)
        time.sleep((rank + turn) % size * apart_ns / 10**9)
        _compute(computed_ns)
        start = time.perf_counter_ns()
        if beside:
            work = call(async_op=True)
            _compute_fixed(BESIDE_PRODUCTS)
            work.wait()
            both = time.perf_counter_ns() - start
            dist.barrier(group)
            start = time.perf_counter_ns()
            _compute_fixed(BESIDE_PRODUCTS)
            times.append((0, max(1, both - (time.perf_counter_ns() - start))))
        else:
            call()
            times.append((start, time.perf_counter_ns()))
        full.fill_(1.0)  # sums of sums would overflow, and infinities are slow on some machines
    return times
