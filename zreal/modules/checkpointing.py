"""Activation checkpointing for real: stretches of forward that torch runs again in backward,
keeping what a policy says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from zsim.models.checkpointing import Checkpointing

SAVED: dict[str, tuple[str, ...]] = {
    "linear": ("mm", "addmm"),
    "attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
"""The aten calls whose outputs a selective policy keeps, by operator."""


def recomputed(
    function: Callable[..., Any], *inputs: Any, save: tuple[str, ...] = (), every: int = 1,
    **named: Any,
) -> Any:
    """`function(*inputs, **named)` under torch's non-reentrant activation checkpointing; outputs of
    `save` operators are kept.

    Of the linears only the first of each `every` are.
    """
    if not save:
        return checkpoint(function, *inputs, use_reentrant=False, **named)
    kept = [getattr(torch.ops.aten, name).default for kind in save for name in SAVED[kind]]
    contexts = partial(_contexts, kept, every=every)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts, **named)


def as_asked(asked: Checkpointing, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """`function(*inputs, **named)`, recomputed whole as `asked` says."""
    with set_checkpoint_early_stop(asked.early_stop):
        return recomputed(function, *inputs, save=asked.save, every=asked.save_every, **named)


@contextmanager
def recomputing(model: nn.Module, fqns: Iterable[str], asked: Checkpointing) -> Iterator[None]:
    """Inside, each module of `model` called one of `fqns` is recomputed as `asked` says, its hooks
    apart, which run once."""
    before = [(part, part.__dict__.get("forward")) for part in map(model.get_submodule, fqns)]
    for part, _ in before:
        part.forward = partial(as_asked, asked, part.forward)
    try:
        yield
    finally:
        for part, own in before:
            del part.forward
            if own is not None:
                part.forward = own


def _contexts(kept: list[Any], *, every: int) -> Any:
    """torch's selective contexts, which ask for each aten call; products are counted apart in
    forward and in recomputation."""
    products = {getattr(torch.ops.aten, name).default for name in SAVED["linear"]}
    counts: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, call: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        if call in products:
            counts[context.is_recompute] += 1
        passed_over = call in products and (counts[context.is_recompute] - 1) % every
        return (
            CheckpointPolicy.MUST_SAVE
            if call in kept and not passed_over
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)
