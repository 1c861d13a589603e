"""Norms and losses of single calls, as models and trainers write them themselves."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

_EPS = 1e-6


def composite_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as LlamaRMSNorm of transformers: float32 but for the product with the weight."""
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + _EPS)
    return weight * x.to(dtype)


def composite_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of `logits` (tokens × vocabulary) against the class of each token."""
    each = cast(Any, _InPlaceCrossEntropy).apply(logits, targets)
    return cast(Tensor, each.mean())


class _InPlaceCrossEntropy(Function):
    """Megatron's and nanotron's cross-entropy on one rank: it keeps the softmax, and its backward
    makes the gradient in there."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token."""
        softmax = logits - torch.max(logits, dim=-1)[0].unsqueeze(-1)
        chosen = softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        torch.exp(softmax, out=softmax)
        total = softmax.sum(-1)
        softmax.div_(total.unsqueeze(-1))
        context.save_for_backward(softmax, targets)
        return torch.log(total) - chosen

    @staticmethod
    def backward(context: Any, *gradients: Any) -> tuple[Tensor, None]:
        """The softmax, less 1 at the class of each token, times the gradient."""
        (gradient,), (softmax, targets) = gradients, context.saved_tensors
        ones = torch.ones_like(targets, dtype=softmax.dtype).neg_()
        softmax.scatter_add_(-1, targets.unsqueeze(-1), ones.unsqueeze(-1))
        return softmax.mul_(gradient.unsqueeze(-1)), None
