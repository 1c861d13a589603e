"""Aspects in which a predicted and a measured Run are compared."""

from __future__ import annotations

from typing import Literal, get_args

Aspect = Literal["order", "bytes", "memory", "numerics", "time"]
ASPECTS: tuple[Aspect, ...] = get_args(Aspect)
