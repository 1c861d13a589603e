"""Whole parameters and gradients of an observed subject, for parity; collectives of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from zreal.observer.subjects import Subject


def whole_parameters(subject: Subject) -> dict[str, Tensor]:
    """Every parameter whole, by the model's fqn: those that the optimizer steps come first, as it
    has them, which may be float32 master copies."""
    if subject.whole is not None:
        return subject.whole("parameters")
    named = dict(subject.module.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    stepped = subject.masters or tuple(named[name] for name in trained)
    return _whole(dict(zip(trained, stepped, strict=True)) | {
        name: parameter for name, parameter in named.items() if name not in trained
    })


def whole_gradients(subject: Subject) -> dict[str, Tensor]:
    """Every gradient whole, by the model's fqn. FSDP1's then take the place of its parameters, so
    that nothing trains any longer."""
    if subject.whole is not None:
        return subject.whole("gradients")
    named = subject.module.named_parameters()
    return _whole({name: p.grad for name, p in named if p.grad is not None})


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): _full(tensor).detach().cpu()
        for name, tensor in tensors.items()
    }


def _full(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole
