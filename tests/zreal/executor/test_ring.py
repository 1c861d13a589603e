"""Ring collectives over sends against torch's own, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from zreal import torch_private
from zreal.executor import ring
from zreal.processes.launch import launch
from zreal.processes.rendezvous import rendezvous
from zsim.cluster.collectives import ring as formulas

pytestmark = pytest.mark.gloo
DTYPES = ("int64", "int32", "float32", "bfloat16")
Case = tuple[str, int]


@pytest.mark.parametrize("world_size", [2, 3, 4])  # two ranks have the same rank on both sides
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cases=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000)), min_size=20, max_size=20
    ),
)
def test_rings_are_bitwise_gloo_and_send_what_a_ring_must(
    world_size: int, cases: list[Case]
) -> None:
    body = "tests.zreal.executor.test_ring:compared"
    every = launch(body, {"cases": cases}, world_size=world_size)
    assert [wrong for rank in every for wrong in rank["wrong"]] == []
    for rank, result in enumerate(every):
        for (dtype, numel), sent in zip(cases, result["sent"], strict=True):
            itemsize = getattr(torch, dtype).itemsize
            for op, nbytes in sent.items():
                length = numel if op == "all_reduce" else numel * world_size
                expected = itemsize * formulas.bytes_sent(
                    op, length, group_size=world_size, rank=rank
                )
                assert nbytes == expected, (op, dtype, numel)


def compared(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None],
) -> dict[str, Any]:
    """Bytes that each collective of this rank sent, and those whose results differ from gloo's."""
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    wrong, sent = [], []
    for index, (dtype, numel) in enumerate(arguments["cases"]):
        torch.manual_seed(1000 * index + rank)
        values = torch.randint(-(2**20), 2**20, (numel * world_size,))
        full = values.to(getattr(torch, dtype))
        if full.is_floating_point() and world_size > 2:
            full = full.sign()  # sums of few small integers do not depend on their order
        own, bytes_sent = full[:numel].clone(), {}
        pairs: dict[str, tuple[Tensor, Tensor]] = {}

        ours, theirs = torch.zeros_like(full), torch.zeros_like(full)
        bytes_sent["all_gather"] = ring.all_gather(ours, own)
        torch_private.all_gather(theirs, own, group=dist.group.WORLD)
        pairs["all_gather"] = ours, theirs

        ours, theirs = torch.zeros_like(own), torch.zeros_like(own)
        before = full.clone()
        bytes_sent["reduce_scatter"] = ring.reduce_scatter(ours, full)
        pairs["input of reduce_scatter"] = full, before
        torch_private.reduce_scatter(theirs, full.clone(), group=dist.group.WORLD)
        pairs["reduce_scatter"] = ours, theirs

        ours, theirs = own.clone(), own.clone()
        bytes_sent["all_reduce"] = ring.all_reduce(ours)
        dist.all_reduce(theirs)
        pairs["all_reduce"] = ours, theirs
        wrong += [
            f"{op}: {dtype} × {numel}" for op, both in pairs.items() if not torch.equal(*both)
        ]
        sent.append(bytes_sent)
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong, "sent": sent}
