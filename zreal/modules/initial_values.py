"""What parameters and inputs begin with: from the seed and their own names alone, so that every
rank and strategy has the same numbers."""

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
    """A generator that depends on the whole `key`. torch's on the CPU looks at the low 32 bits of
    its seed only."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def initial(parameter: Parameter, *, seed: int) -> Tensor:
    """What `parameter` begins with: it depends on the seed and its own fqn alone."""
    generator = generator_of(seed, parameter.fqn)
    if len(parameter.shape) == 1:
        centre = 1.0 if parameter.fqn.endswith("weight") else 0.0
        return centre + 0.02 * torch.randn(parameter.shape, generator=generator)
    scale: float = min(0.1, parameter.shape[-1] ** -0.5)
    return torch.randn(parameter.shape, generator=generator) * scale


class ModelError(ZsimError):
    """A model of which no real module can be built."""
