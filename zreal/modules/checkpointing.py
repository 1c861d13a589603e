"""Activation checkpointing with torch, of whole forwards or all but the outputs a policy saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
"""aten calls whose outputs a selective policy saves, by operator."""
_AROUND: list[Callable[[], AbstractContextManager[object]]] = []
"""Contexts around the call of a checkpoint, of which the last counts; none where it is empty."""


def checkpointed(
    function: Callable[..., Any], *inputs: Any, save: tuple[str, ...] = (), every: int = 1,
    **named: Any,
) -> Any:
    """Call `function` under torch's non-reentrant checkpointing, which saves outputs of `save`
    operators.

    Of linears, only the first of each `every` is saved.
    """
    if save:
        kept = [getattr(torch.ops.aten, name).default for kind in save for name in SAVED[kind]]
        named = {**named, "context_fn": partial(_contexts, kept, every=every)}
    with _AROUND[-1]() if _AROUND else nullcontext():
        return checkpoint(function, *inputs, use_reentrant=False, **named)


@contextmanager
def saving_inputs(around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Inside, each checkpoint saves its inputs in a context that `around` makes."""
    _AROUND.append(around)
    try:
        yield
    finally:
        _AROUND.pop()


def checkpointed_whole(
    settings: Checkpointing, function: Callable[..., Any], *inputs: Any, **named: Any
) -> Any:
    """Call `function`, all of which is checkpointed by the scenario's `settings`."""
    with set_checkpoint_early_stop(settings.early_stop):
        save, every = settings.save, settings.save_every
        return checkpointed(function, *inputs, save=save, every=every, **named)


@contextmanager
def recomputing(
    model: nn.Module, fqns: Iterable[str], settings: Checkpointing
) -> Iterator[None]:
    """Inside, modules `fqns` of `model` are checkpointed by `settings`; their hooks run once."""
    before = [(part, part.__dict__.get("forward")) for part in map(model.get_submodule, fqns)]
    for part, _ in before:
        part.forward = partial(checkpointed_whole, settings, part.forward)
    try:
        yield
    finally:
        for part, own in before:
            del part.forward
            if own is not None:
                part.forward = own


def _contexts(kept: list[Any], *, every: int) -> Any:
    """torch's contexts of selective checkpointing, whose policy decides for each aten call.

    Products are counted separately in forward and in recomputation.
    """
    products = {getattr(torch.ops.aten, name).default for name in SAVED["linear"]}
    counts: Counter[bool] = Counter()

    def policy(
        context: SelectiveCheckpointContext, call: Any, *_: Any, **__: Any
    ) -> CheckpointPolicy:
        if call in products:
            counts[context.is_recompute] += 1
        is_skipped = call in products and (counts[context.is_recompute] - 1) % every
        return (
            CheckpointPolicy.MUST_SAVE
            if call in kept and not is_skipped
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)
