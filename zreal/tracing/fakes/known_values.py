"""Values that follow from the shapes: positions, masks and counts that a module computes to decide
what to do.

Fake tensors have no values, yet a module may ask whether its mask is all ones. What is computed
from nothing, or from small integer inputs of which an example was given, is therefore computed for
real beside the fake tensors. Anything that depends on weights or on other inputs stays unknown, and
asking for it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zreal import torch_private

MAX_NUMEL = 1 << 20
"""Elements of the largest integer or bool tensor whose values are followed."""
MAX_FLOATS = 1 << 12

_NAME = "zsim_known_value"
_ASKS = "aten::_local_scalar_dense"


def tell(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """The fake `tensor` stands for `source`: integer and bool values that are known of it are known
    of `tensor`."""
    known = None if source.is_floating_point() else KnownValues().value(source)
    if known is not None:
        with torch_private.real_tensors():
            setattr(tensor, _NAME, known.clone())


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (MAX_FLOATS if tensor.is_floating_point() else MAX_NUMEL)


class KnownValues:
    """Follows operators; knows the values of their results where it knows those of all their
    arguments."""

    def __init__(self) -> None:
        self._stale: dict[int, torch.UntypedStorage] = {}

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a fake tensor, or None."""
        if not torch_private.is_fake(tensor):
            return tensor if tensor.device.type == "cpu" and _is_small(tensor) else None
        known = getattr(tensor, _NAME, None)
        if isinstance(known, torch.Tensor) and id(known.untyped_storage()) not in self._stale:
            return known
        return None

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The number that operator `name` asks of a tensor; None when it asks none, or none is
        known."""
        known = self.value(arguments[0]) if name == _ASKS else None
        if known is None:
            return None
        with torch_private.real_tensors():
            return known.item()

    def follow(
        self, func: Any, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
    ) -> None:
        """An operator has run on fake tensors: run it on the values if all are known."""
        name = func.name()
        results = result if isinstance(result, list | tuple) else [result]
        if not results or not all(isinstance(tensor, torch.Tensor) for tensor in results):
            return
        in_place = name.partition(".")[0].endswith("_")
        if (
            all(self._follows(func, tensor) for tensor in results)
            and self._all_known([*arguments, *options.values()])
            and not (in_place and not self._owns(arguments[0]))
        ):
            with torch_private.real_tensors(), torch.no_grad():
                known = {key: self._real(value) for key, value in options.items()}
                outputs = func(*self._real(arguments), **known)
                for tensor, values in zip(
                    results, outputs if isinstance(result, list | tuple) else [outputs], strict=True
                ):
                    setattr(tensor, _NAME, values)
        elif in_place:
            self._forget(arguments[0])

    def _follows(self, func: Any, result: torch.Tensor) -> bool:
        """True if an operator's values are small, and the same each time."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        return (
            _is_small(result)
            and not random
            and not func.name().startswith(("aten::empty", "aten::new_empty"))
        )

    def _owns(self, tensor: Any) -> bool:
        """True if the tracer may change the values: they are of no real tensor of the user's."""
        return isinstance(tensor, torch.Tensor) and torch_private.is_fake(tensor)

    def _all_known(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return self.value(value) is not None
        return all(map(self._all_known, value)) if isinstance(value, list | tuple) else True

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # views of it may be changed
            return self.value(value) if torch_private.is_fake(value) else value.clone()
        return type(value)(map(self._real, value)) if isinstance(value, list | tuple) else value

    def _forget(self, tensor: Any) -> None:
        """`tensor` was changed in a way that is not known: neither its values nor those of its
        views are any more."""
        known = getattr(tensor, _NAME, None)
        if isinstance(known, torch.Tensor):
            storage = known.untyped_storage()
            self._stale[id(storage)] = storage


@contextmanager
def as_on_real_tensors() -> Iterator[None]:
    """transformers takes other ways (it materialises masks) when it sees fake tensors; inside it
    takes those of real ones."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return
    module.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        module.is_fake_tensor = original
