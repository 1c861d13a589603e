"""Refusal of views whose memory was changed in place after they were made.

torch makes a new grad_fn for such a view when it is used next. On real tensors that is
AsStridedBackward0, whose backward allocates. On fake tensors, as on any subclass of Tensor, torch
takes the views that led from the base to it once more, and allocates nothing. The output of a
linear layer of a three-dimensional input is a view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from zreal import torch_private
from zreal.tracing.errors import refuse
from zreal.tracing.kernels import tensors

_MADE_AT = "zsim_made_at"


def note_views(arguments: tuple[Any, ...], result: Any) -> None:
    """An operator has run: those of its results that are views remember how often their base had
    been changed by then."""
    bases = {id(tensor.untyped_storage()): tensor for tensor in tensors(arguments)}
    for tensor in tensors(result):
        base = bases.get(id(tensor.untyped_storage()))
        if base is not None and all(tensor is not other for other in tensors(arguments)):
            setattr(tensor, _MADE_AT, torch_private.version(base))


def require_unchanged(where: str, inputs: Iterable[Tensor]) -> None:
    """UntraceableError for a view that needs a gradient, and whose memory was changed since it was
    made. To put a hook on it would end torch by a segmentation fault."""
    for tensor in inputs:
        made_at = getattr(tensor, _MADE_AT, None)
        if (
            made_at not in (None, torch_private.version(tensor))
            and tensor.requires_grad
            and torch_private.is_view(tensor)
        ):
            raise refuse(
                where, "views whose memory stays as it is",
                "one that was changed in place, for which autograd allocates in backward what a "
                "trace does not show",
                "make the change out of place (inplace=False), or of a clone()",
            )
