"""Prefetch that the user sets: order, bytes and memory as fully_shard has them, and more of the
all-gathers hidden."""

from __future__ import annotations

import pytest

from tests.support.agreement import inexact
from tests.support.sampling import one_in
from zsim.ir.ops import COLLECTIVES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse


def scenario(options: str, *, ranks: int = 4, model: str = "gpt-tiny", more: str = "") -> Scenario:
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 2, sequence_length = {1 if "mlp" in model else 8}, accumulation = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {options} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
{more}
"""
    return parse(text.encode(), where="prefetch.toml")


@pytest.mark.parametrize(
    ("options", "more"),
    one_in(3, [
        ('name = "fsdp2", forward_prefetch = 1', {}), ('name = "fsdp2", backward_prefetch = 1', {}),
        ('name = "fsdp2", forward_prefetch = 2, backward_prefetch = 2, '
         'reshard_after_forward '
         "= true", {}),
        ('name = "fsdp2", forward_prefetch = 3, backward_prefetch = 3, '
         'reshard_after_forward '
         "= false", {}),
        ('name = "fsdp2", forward_prefetch = 1, backward_prefetch = 2, '
         'reshard_after_forward '
         "= 2", {}),
        ('name = "fsdp2", forward_prefetch = 1, backward_prefetch = 1', {"ranks": 1}),
        ('name = "fsdp2", forward_prefetch = 9, backward_prefetch = 9', {"model": "mlp-uneven"}),
        ('name = "hsdp", dp_replicate = 2, dp_shard = 2, forward_prefetch = 1, '
         "backward_prefetch = 2", {"more": 'activation_checkpointing = { mode = "full" }'}),
    ]),
)
def test_prefetch_is_exact_in_order_bytes_and_memory(options: str, more: dict[str, object]) -> None:
    case = scenario(options, **more)  # type: ignore[arg-type]
    assert inexact(case) == []


def test_prefetching_moves_all_gathers_forward_and_adds_none() -> None:
    plain, ahead = (
        plan(
            scenario(f'name = "fsdp2", forward_prefetch = {n}, backward_prefetch = {n}'),
            device="cpu",
        )
        .ranks[0]
        .steady
        for n in (0, 2)
    )
    sent = [
        sorted((op.kind, op.unit, op.nbytes) for op in ops if op.kind in COLLECTIVES)
        for ops in (plain, ahead)
    ]
    assert sent[0] == sent[1]
    order = [
        (op.kind, op.unit) for op in ahead
        if op.kind in ("all_gather", "forward") and op.micro_batch == 0
    ][:6]
    assert order == [
        ("all_gather", "root"), ("forward", "root"),
        *(("all_gather", f"blocks.{i}") for i in range(3)), ("forward", "blocks.0"),
    ]
