"""Families of models: sizes, and how a model is built of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zsim.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's sizes and how they are built."""

    sizes: type[Any]
    build: Callable[..., ModelSpec]
