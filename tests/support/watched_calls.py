"""Calls of torch's operators, as a test watches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

See = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]
"""Is told of a call: the operator, what it was given, by position and by name, and its result."""


class WatchedCalls(TorchDispatchMode):
    """Inside, `see` is told of every call once it has a result."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {}, result)
        return result
