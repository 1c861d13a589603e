"""The measurements that calibrate a machine: small models, some strategies, messages of all sizes.

Sizes lie beside those of the presets, so that no preset is predicted by its own measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zsim.engine.costs.issue_times import SOON_NS, TICK_NS
from zsim.runs.backend import CollectiveRequest, MachineRequest
from zsim.scenario.scenario import Scenario

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
SIZES = (2**9, 2**13, 2**15, 2**17, 2**19, 2**21, 2**23)
"""Bytes of the full messages."""
WAKE_SIZES = (2**9, 2**15)
"""Bytes of the messages whose wait for a core is measured, after a tick of compute."""
BESIDE_NBYTES = 2**19
"""Bytes of the messages that are measured beside compute."""
PRODUCTS = ((96, 160, 640), (384, 640, 160), (512, 320, 320), (192, 448, 448))
"""(m, n, k) of products of matrices, beside those of the presets."""
ATTENTIONS = ((4, 4, 48, 24), (4, 4, 80, 40), (2, 4, 176, 48), (1, 4, 448, 56))
"""(batch, heads, tokens, width of a head) of causal attention, beside those of the presets."""
REPEATS = {False: 60, True: 24}
"""Repetitions of a collective, in the full form and in the quick one."""
BUDGET_S = {False: 150.0, True: 17.0}
"""Seconds of the start and all measurements. Beyond it each is repeated a few times alone, which
takes longer only where other work has most of the cores."""
STEP_REPEATS = {False: 20, True: 10}


def request(world_size: int, *, quick: bool) -> MachineRequest:
    """The measurements with `world_size` ranks at work; `quick` takes seconds, else minutes."""
    return MachineRequest(
        world_size=world_size, scenarios=tuple(_scenarios(world_size, quick=quick)),
        collectives=tuple(_collectives(world_size, quick=quick)),
        repeats=STEP_REPEATS[quick], timeout_s=120.0 if quick else 600.0, products=PRODUCTS,
        attentions=ATTENTIONS, budget_s=BUDGET_S[quick],
    )


def _collectives(world_size: int, *, quick: bool) -> Iterator[CollectiveRequest]:
    """Each kind over each size of group, by size of message; over all ranks also after a tick of
    compute, and beside compute."""
    for ranks in _group_sizes(world_size):
        for kind in KINDS:
            for nbytes in SIZES[::2] if quick else SIZES:
                repeats = REPEATS[quick] if nbytes < 2**22 else REPEATS[quick] // 2
                yield CollectiveRequest(
                    kind=kind, nbytes=nbytes, ranks=ranks, repeats=repeats,
                    computed_ns=SOON_NS,
                )
    if world_size == 1:
        return
    for kind in KINDS:
        for nbytes in WAKE_SIZES:
            yield CollectiveRequest(
                kind=kind, nbytes=nbytes, ranks=world_size, repeats=REPEATS[quick],
                computed_ns=TICK_NS,
            )
        yield CollectiveRequest(
            kind=kind, nbytes=BESIDE_NBYTES, ranks=world_size, repeats=REPEATS[quick],
            computed_ns=SOON_NS, beside=True,
        )


def _group_sizes(world_size: int) -> list[int]:
    """The whole world, and what a mesh of two axes divides it into."""
    return [size for size in range(2, world_size + 1) if world_size % size == 0]


def _scenarios(world_size: int, *, quick: bool) -> Iterator[Scenario]:
    for model, batch, strategies in _cases(quick=quick):
        for name in strategies:
            yield Scenario(
                model=model, batch=batch, strategy={"name": name},
                cluster={"preset": "cpu-gloo", "ranks": world_size},
                optimizer={"name": "adamw", "implementation": "foreach"},
            )


def _cases(
    *, quick: bool
) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """Models, batches and strategies: products, element-wise kernels and optimizer in different
    proportions; hooks and calls with and without much work."""
    yield _mlp(3, 96), _batch(2), ("ddp", "fsdp2", "zero3")
    yield _mlp(3, 288), _batch(24), ("ddp", "zero3")
    yield _mlp(3, 640), _batch(24), ("ddp",)  # its states do not fit into a cache
    yield _gpt(3, 96), _batch(2, 24), ("fsdp2", "zero3")
    yield _gpt(3, 96), _batch(6, 80), ("ddp",)
    yield _llama(3, 96), _batch(2, 24), ("ddp", "fsdp2")
    yield _llama(4, 160), _batch(4, 96), ("zero3",)
    yield _gpt(4, 160), _batch(4, 96), ("fsdp2",)
    if not quick:
        yield _mlp(5, 160), _batch(8), ("ddp", "zero1", "zero2", "fsdp2", "zero3")
        yield _mlp(3, 640), _batch(24), ("zero3",)
        yield _mlp(4, 448), _batch(12), ("ddp", "fsdp2")
        yield _gpt(3, 96), _batch(2, 24), ("ddp", "zero1", "zero2")
        yield _gpt(4, 160), _batch(3, 48), ("ddp", "zero2", "zero3")
        yield _llama(3, 96), _batch(4, 48), ("ddp", "zero1", "zero3")
        yield _llama(4, 160), _batch(2, 128), ("fsdp2", "zero2", "ddp")


def _batch(micro_batch: int, sequence_length: int = 1) -> dict[str, Any]:
    return {"micro_batch": micro_batch, "sequence_length": sequence_length}


def _mlp(num_layers: int, width: int) -> dict[str, Any]:
    sizes = {"dims": [width] * (num_layers + 1), "hidden": 3 * width, "num_classes": 24}
    return {"family": "mlp", "sizes": sizes}


def _gpt(num_layers: int, width: int) -> dict[str, Any]:
    sizes = {
        "num_layers": num_layers, "hidden_size": width, "num_heads": 4, "vocabulary": 6 * width
    }
    return {"family": "gpt", "sizes": sizes}


def _llama(num_layers: int, width: int) -> dict[str, Any]:
    sizes = {
        "num_layers": num_layers, "hidden_size": width, "num_heads": 4, "num_kv_heads": 2,
        "feed_forward": 2 * width + 32, "vocabulary": 6 * width,
    }
    return {"family": "llama", "sizes": sizes}
