"""Families of models: sizes, and how a model is built of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zsim.models.spec import ModelSpec
from zsim.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's sizes and how they are built."""

    sizes: type[Any]
    build: Callable[..., ModelSpec]
