"""Families of models: sizes, and how a model is built of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from zsim.models.spec import ModelSpec


class Family(NamedTuple):
    """A family's sizes and how they are built."""

    sizes: type[Any]
    build: Callable[..., ModelSpec]
