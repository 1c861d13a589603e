"""Bytes of kernels that torch.compile fuses, beside those that inductor counts for its own.

Inductor lowers for a CPU here. It fuses there as on a GPU, but for softmax and rotary positions,
which it makes in several kernels.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor.graph import GraphLowering
from torch.nn import functional

from zsim.cluster.devices import load_device
from zsim.engine.costs.kernel_time import kernel_ns
from zsim.engine.execution import Execution
from zsim.ir.ops import Kernel
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario

pytestmark = [
    pytest.mark.slow,  # g++ takes half a minute for what inductor writes
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++"),
]
COMPILED = Execution(compile=True)
MICRO_BATCH, LENGTH, WIDTH, VOCABULARY = 4, 128, 256, 16384
TOKENS = MICRO_BATCH * LENGTH


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Bytes of what inductor fuses of each graph that it compiles, forward first."""
    nbytes: list[int] = []
    count_bytes = GraphLowering.count_bytes

    def count(graph: Any) -> Any:
        nbytes.append(sum(
            node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes
            if "Extern" not in type(node).__name__
        ))
        return count_bytes(graph)

    monkeypatch.setattr(GraphLowering, "count_bytes", count)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled there yet
    log = compile_fx.inductor_metrics_log
    before = log.level
    log.setLevel(logging.INFO)  # inductor counts for this log alone
    torch._dynamo.reset()
    yield nbytes
    torch._dynamo.reset()
    log.setLevel(before)


def trained(step: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """One step, forward and backward, with `step` compiled."""
    result = torch.compile(step)(*inputs)
    result.backward(torch.ones_like(result))


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def kernels_of(unit: str, parameters: str = "bf16") -> list[Kernel]:
    """The kernels of one unit of a llama of these sizes, forward and backward."""
    case = planned(Scenario(
        model={
            "family": "llama",
            "sizes": {
                "num_layers": 3, "hidden_size": WIDTH, "num_heads": 4, "vocabulary": VOCABULARY,
                "feed_forward": 4 * WIDTH, "loss_dtype": "float32",
            },
        },
        batch={"micro_batch": MICRO_BATCH, "sequence_length": LENGTH},
        cluster={"preset": "dgx-h100"}, strategy={"name": "fsdp2"},
        precision={"parameters": parameters}, execution={"compile": True},
    ))
    return [
        kernel for op in case.program.ranks[0].steady
        if op.unit == unit and op.kind in ("forward", "backward") for kernel in op.kernels
    ]


def moved(kernels: list[Kernel], execution: Execution = COMPILED) -> float:
    """Bytes of what is fused: the time of kernels on a device that does nothing but move them."""
    device = replace(
        load_device("h100-80"), kernel=0, memory_bandwidth=10**9, memory_efficiency=1.0,
        elementwise_efficiency=1.0,
    )
    fused = [kernel for kernel in kernels if not kernel.shape]
    return sum(kernel_ns(kernel, device, execution) for kernel in fused)


@pytest.mark.parametrize(("parameters", "dtype"), [
    ("bf16", torch.bfloat16), ("fp32", torch.float32),
])
def test_a_compiled_loss_reads_its_logits_twice_and_writes_their_gradient(
    parameters: str, dtype: torch.dtype, fused: list[int]
) -> None:
    """Casts, log_softmax and nll_loss are one kernel in each direction; in eager mode they move
    eight times as much in bf16."""
    def loss(x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(x, head).float(), targets)

    targets = torch.randint(VOCABULARY, (TOKENS,))
    factors = parameter(TOKENS, WIDTH, dtype=dtype), parameter(VOCABULARY, WIDTH, dtype=dtype)
    trained(loss, *factors, targets)
    forward, backward = fused
    logits = dtype.itemsize * TOKENS * VOCABULARY
    assert forward == pytest.approx(2 * logits, rel=0.01)  # counts a gather as all of its source
    assert backward == pytest.approx(2 * logits, rel=0.01)
    own = [k for k in kernels_of("root", parameters) if k.operator == "log_softmax"]
    ours = moved(own, replace(COMPILED, wide_products=parameters == "fp32"))
    assert ours == pytest.approx(3 * logits, rel=0.01)


def test_a_compiled_block_moves_what_inductor_s_kernels_move(fused: list[int]) -> None:
    """Norms, residuals, rotary positions, SwiGLU and sums of gradients of a llama's block."""
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * weight

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def block(x, first, query, key, value, out, second, gate, down, up, cos, sin):  # type: ignore[no-untyped-def]
        h = norm(x, first)
        q, k, v = (functional.linear(h, w).view(*x.shape[:2], 4, -1) for w in (query, key, value))
        heads = [t.transpose(1, 2) for t in (turned(q, cos, sin), turned(k, cos, sin), v)]
        a = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + functional.linear(a.transpose(1, 2).reshape(x.shape), out)
        h = norm(x, second)
        h = functional.silu(functional.linear(h, gate)) * functional.linear(h, up)
        return x + functional.linear(h, down)

    angles = [torch.randn(1, LENGTH, 1, WIDTH // 4, dtype=torch.bfloat16) for _ in range(2)]
    square, wide = (WIDTH, WIDTH), (4 * WIDTH, WIDTH)
    trained(
        block, parameter(MICRO_BATCH, LENGTH, WIDTH), parameter(WIDTH),
        *(parameter(*square) for _ in range(4)), parameter(WIDTH), parameter(*wide),
        parameter(*reversed(wide)), parameter(*wide), *angles,
    )
    assert len(fused) == 2
    # 4 of its 74 tensors are copies for rotary positions, which a GPU makes in registers
    assert moved(kernels_of("blocks.1")) == pytest.approx(sum(fused), rel=0.15)
