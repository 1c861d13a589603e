"""Views whose base was changed in place after they were made: their gradients take the way that
they take on real tensors.

torch makes a new grad_fn for such a view when it is used next. On real tensors that is
AsStridedBackward0, whose backward allocates. On fake tensors, as on any subclass of Tensor, torch
takes the views that led from the base to it once more, and allocates nothing. Inside ChangedViews
such a view is therefore replaced, wherever it is used, by one that as_strided makes of its base.
MobileNetV2 needs it, whose dropout changes a flattened view in place, and so does any in-place
activation of a linear layer's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.kernels import tensors

_MADE_AT = "zsim_made_at"
_INSTEAD = "zsim_instead"
_TENSOR: Any = Tensor
_ASK_FOR_HISTORY = (_TENSOR.grad_fn.__get__, _TENSOR.is_leaf.__get__)


def note_views(arguments: tuple[Any, ...], result: Any) -> None:
    """An operator has run: those of its results that are views remember how often their base had
    been changed by then."""
    given = {id(tensor.untyped_storage()): tensor for tensor in tensors(arguments)}
    for tensor in tensors(result):
        base = given.get(id(tensor.untyped_storage()))
        if base is not None and all(tensor is not other for other in tensors(arguments)):
            setattr(tensor, _MADE_AT, torch_private.version(base))


def require_history(where: str, tensor: Tensor) -> None:
    """UntraceableError for a fake tensor on which, were it real, torch would die by a segmentation
    fault when a hook is registered."""
    if _has_stale_history(tensor):
        raise UntraceableError(
            where=where,
            expected="a tensor that torch can put a hook on",
            found="a view that nothing has used since its memory was changed in place; on it "
                  "fully_shard's register_hook ends the process by a segmentation fault",
            remedy="return a clone() of it, or make the change out of place",
        )


class ChangedViews(TorchFunctionMode):
    """Inside, functions get views whose base has changed as real tensors would be. For fake tensors
    that a StorageLog has seen made."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.register_hook:
            require_history("register_hook", args[0])
        return _called(func, args, kwargs or {})

    def __enter__(self) -> Any:
        self._apply = Function.__dict__["apply"]
        apply = self._apply.__func__

        # no mode sees a Function applied
        def instead(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            return _called(lambda *a, **k: apply(cls, *a, **k), args, kwargs)

        Function.apply = classmethod(instead)  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Function.apply = self._apply  # type: ignore[method-assign]


class _OperatorProbe(TorchDispatchMode):
    """Notes in `any` that an operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.any |= not func.name().startswith("prim::")
        return func(*args, **(kwargs or {}))


def _has_stale_history(tensor: Tensor) -> bool:
    """True if its grad_fn is still the one from before the change: then asking for it takes the
    views once more."""
    seen = _OperatorProbe()
    with torch_private.unwatched_functions(), seen:
        _ = _is_changed(tensor) and tensor.grad_fn
    return seen.any


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func`, with changed views replaced; one that it gives back is the view itself again."""
    own: dict[int, Tensor] = {}
    args, kwargs = _mapped(args, own), _mapped(kwargs, own)
    result = func(*args, **kwargs)
    if own:
        with torch_private.unwatched_functions():
            if func in _ASK_FOR_HISTORY or any(
                tensor.grad_fn is not None for tensor in tensors(result)
            ):
                # now it has been used: torch makes its history anew, or says why it does not
                for view in own.values():
                    _ = view.grad_fn
    return own.get(id(result), result)


def _mapped(value: Any, own: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if not _is_changed(value):
            return value
        instead = _as_strided(value)
        own[id(instead)] = value
        return instead
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, own) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, own) for key, item in value.items()}
    return value


def _is_changed(tensor: Tensor) -> bool:
    if not tensor.requires_grad or not torch_private.is_view(tensor):
        return False
    made_at = getattr(tensor, _MADE_AT, None)
    return made_at is not None and made_at != torch_private.version(tensor)


def _as_strided(view: Tensor) -> Tensor:
    """The same part of the base as it is now; one and the same tensor until it changes again, as
    hooks are put on it."""
    now = torch_private.version(view)
    at, replacement = getattr(view, _INSTEAD, (None, None))
    if at == now and isinstance(replacement, Tensor):
        return replacement
    with torch_private.unwatched_functions(), torch.enable_grad():
        replacement = torch_private.base(view).as_strided(
            view.size(), view.stride(), view.storage_offset()
        )
    setattr(view, _INSTEAD, (now, replacement))
    return replacement
