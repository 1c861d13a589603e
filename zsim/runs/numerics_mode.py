"""Ranks of a real run that train a single-process reference of the whole model, to compare with."""

from __future__ import annotations

from typing import Literal, get_args

NumericsMode = Literal["full", "sampled", "none"]
"""All of them, the first alone, or none."""
NUMERICS_MODES: tuple[NumericsMode, ...] = get_args(NumericsMode)
