"""The strategies by name: a pure function from a Training, a mesh and its own options to a Program. To add one, add a file and a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zsim.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """`plan(training, mesh=…, options=…)`, the class of its options, and the mesh axes it uses, outermost first.

    `casts_input`: with 2-byte parameters it casts floating-point inputs of the model itself, as fully_shard's policy does.
    """

    plan: Callable[..., Program]
    options: type[Any]
    axes: tuple[str, ...]
    casts_input: bool = False


STRATEGIES: dict[str, Strategy] = {}
