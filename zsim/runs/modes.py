"""Modes of a real run: numerics that it compares, and compute that it does."""

from __future__ import annotations

from typing import Literal, get_args

NumericsMode = Literal["full", "sampled", "none"]
"""Ranks that train a single-process reference of the whole model: all, the first alone, or none."""
NUMERICS_MODES: tuple[NumericsMode, ...] = get_args(NumericsMode)
ComputeMode = Literal["real", "emulated"]
"""Forward and backward of timed steps: kernels, or timers of the predicted length."""
COMPUTE_MODES: tuple[ComputeMode, ...] = get_args(ComputeMode)
