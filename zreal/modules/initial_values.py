"""Initial values of parameters and inputs, from the seed and their names alone.

Every rank and strategy therefore starts with the same numbers."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from zsim.errors import ZsimError
from zsim.models.spec import Parameter

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16
}


def generator_of(*key: int | str) -> torch.Generator:
    """A generator seeded by the whole `key`, hashed to the 32 bits that torch's CPU generator uses.
    """
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def initial(parameter: Parameter, *, seed: int) -> Tensor:
    """Initial value of `parameter` in float32, from the seed and its fqn alone."""
    generator = generator_of(seed, parameter.fqn)
    if len(parameter.shape) == 1:
        centre = 1.0 if parameter.fqn.endswith("weight") else 0.0
        return centre + 0.02 * torch.randn(parameter.shape, generator=generator)
    scale: float = min(0.1, parameter.shape[-1] ** -0.5)
    return torch.randn(parameter.shape, generator=generator) * scale


class ModelError(ZsimError):
    """A model whose torch module cannot be built."""
