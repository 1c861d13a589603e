"""A user's own module built on the meta device: operators that make its tensors are recorded, and
run again for one parameter at a time. No rank then holds the whole module.

Small tensors are made at once, so that a module may read them. What was not made on the meta device
is told, and the module is then built whole.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zreal import torch_private

SMALL = 1024
"""Most elements of a tensor that is made at once."""
MOST_DATA_NBYTES = 1 << 20
"""Most bytes of data, such as a table of the user's, that recorded operators may hold."""


class NotDeferrableError(Exception):
    """A build that needs values of tensors on the meta device, or that has values of its own."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One operator; `reads` and `writes` are storages on the meta device."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any
    reads: frozenset[int]
    writes: frozenset[int]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _deferred(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_meta]


@dataclass(slots=True)
class Deferred:
    """Recorded operators of one build, and where each parameter's values come from."""

    seed: int
    recorded: list[_Recorded] = field(default_factory=list)
    data_nbytes: int = 0
    _writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Operators that write a storage, by their number."""
    _parameters: dict[str, Tensor] = field(default_factory=dict)

    def add(self, run: Callable[..., Any], arguments: Any, options: Any, result: Any) -> None:
        """Record one operator that has run on the meta device."""
        read = _deferred((arguments, options))
        before = frozenset(map(_storage, read))
        written = frozenset(map(_storage, _deferred(result))) - before
        written |= frozenset(map(_storage, _changed(run, arguments, options)))
        kept: tuple[Any, Any] = tree_map(_kept, (arguments, options))
        result = tree_map(_kept, result)
        for storage in written:
            self._writers[storage].append(len(self.recorded))
        self.data_nbytes += sum(
            leaf.nbytes for leaf in tree_leaves(kept) if isinstance(leaf, Tensor) and not
            leaf.is_meta
        )
        self.recorded.append(_Recorded(run, kept[0], kept[1], result, before, written))

    def keep_parameters(self, module: nn.Module) -> None:
        """Note the recorded tensor of each parameter, which casts on the meta device change."""
        self._parameters = {
            fqn: parameter.detach()
            for fqn, parameter in module.named_parameters(remove_duplicate=False)
            if parameter.is_meta
        }

    def fill_rest(self, module: nn.Module) -> None:
        """Give values to all of the module's tensors on the meta device but its parameters.

        NotDeferrableError where it keeps a parameter as a plain attribute, or where a large one has
        values of its own.
        """
        if self.data_nbytes > MOST_DATA_NBYTES:
            raise NotDeferrableError(
                f"the module holds {self.data_nbytes:,} B of data, as loaded weights"
            )
        values: dict[int, Tensor] = {}
        for path, child in module.named_modules():
            for name, parameter in child.named_parameters(recurse=False):
                fqn = f"{path}.{name}".lstrip(".")
                if not parameter.is_meta and parameter.numel() > SMALL:
                    raise NotDeferrableError(f"{fqn} has values of its own, as loaded weights have")
                if parameter.is_meta and self._is_empty(parameter):
                    raise NotDeferrableError(f"{fqn} gets no values on the meta device")
            for name, buffer in list(child.named_buffers(recurse=False)):
                setattr(child, name, self._filled(buffer, values))
            for name, attribute in list(vars(child).items()):
                plain = isinstance(attribute, Tensor | list | tuple | dict)
                if plain and name not in ("_parameters", "_buffers", "_modules") and _deferred(
                    attribute
                ):
                    setattr(child, name, tree_map(partial(self._filled, values=values), attribute))

    def _is_empty(self, parameter: Tensor) -> bool:
        """True where nothing but its allocation has made the parameter."""
        makers = [self.recorded[number].run for number in self._writers[_storage(parameter)]]
        return all("empty" in str(getattr(maker, "name", str)()) for maker in makers)

    def _filled(self, value: Any, values: dict[int, Tensor]) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        if isinstance(value, nn.Parameter):
            raise NotDeferrableError("the module keeps a parameter in a plain attribute")
        if id(value) not in values:
            values[id(value)] = self.value(value)
        return values[id(value)]

    def filled(self, value: Any) -> Any:
        """Tensors with values in place of those on the meta device, wherever `value` holds them."""
        return tree_map(partial(self._filled, values={}), value)

    def parameter(self, fqn: str) -> Tensor:
        """The values of a parameter, in host memory."""
        return self.value(self._parameters[fqn])

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a tensor on the meta device, by the operators that wrote its storage."""
        storages: dict[int, Any] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number in sorted(self._needed(_storage(tensor))):
                self._run(number, storages)
        real = _real(storages, tensor)
        return real if real.nbytes == real.untyped_storage().nbytes() else real.clone()

    def _needed(self, storage: int) -> set[int]:
        needed, waiting = set[int](), [(storage, len(self.recorded))]
        while waiting:
            target, before = waiting.pop()
            for number in self._writers[target]:
                if number < before and number not in needed:
                    needed.add(number)
                    reads = self.recorded[number].reads
                    waiting += [(read, number) for read in reads]
        return needed

    def _run(self, number: int, storages: dict[int, Any]) -> None:
        step = self.recorded[number]
        torch.manual_seed(zlib.crc32(repr((self.seed, number)).encode()))
        real = partial(_real, storages)
        arguments, options = tree_map(real, (step.arguments, step.options))
        if "device" in options:
            options["device"] = torch.device("cpu")
        result = step.run(*arguments, **options)
        for meta, made in zip(tree_leaves(step.result), tree_leaves(result), strict=True):
            if isinstance(meta, Tensor) and _storage(meta) in step.writes:
                storages.setdefault(_storage(meta), made.untyped_storage())


def _real(storages: dict[int, Any], value: Any) -> Any:
    """The real tensor of one on the meta device; other values as they are."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    real = torch.empty(0, dtype=value.dtype)
    return real.set_(
        storages[_storage(value)], value.storage_offset(), value.size(), value.stride()
    )


def _kept(value: Any) -> Any:
    """A tensor as it is now: the user's code may change a small one of data later, and put other
    data behind a parameter."""
    if not isinstance(value, Tensor):
        return value
    is_copied = not value.is_meta and value.numel() <= SMALL
    return value.detach().clone() if is_copied else value.detach()


class _Recording(TorchDispatchMode):
    """Runs operators that make or change tensors on the meta device, and records them."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        is_factory = not leaves and any(a.name == "device" for a in func._schema.arguments)
        if not is_factory and not _deferred(leaves):
            return func(*args, **options)
        meta = dict(options)
        if any(argument.name == "device" for argument in func._schema.arguments):
            meta["device"] = torch.device("meta")
        on_meta, meta = tree_map(_on_meta, (args, meta))
        if any(not tensor.is_meta for tensor in _changed(func, args, options)):
            raise NotDeferrableError(f"{func.name()} reads values that are not there yet")
        if options.get("generator") is not None:
            raise NotDeferrableError(f"{func.name()} draws from a generator of its own")
        result = func(*on_meta, **meta)
        if is_factory and sum(leaf.numel() for leaf in _deferred(result)) <= SMALL:
            return func(*args, **options)
        self.deferred.add(func, args, options, result)
        return result


def _changed(run: Any, arguments: Any, options: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes in place; of another function all that it takes."""
    if not hasattr(run, "_schema"):
        return _deferred((arguments, options))
    return [
        leaf
        for position, argument in enumerate(run._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(
            arguments[position] if position < len(arguments) else options.get(argument.name)
        )
        if isinstance(leaf, Tensor)
    ]


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


@contextmanager
def recording(deferred: Deferred) -> Iterator[None]:
    """Context manager in which modules are built on the meta device."""

    def draw(original: Callable[..., Tensor], tensor: Tensor, *bounds: Any, **options: Any) -> Any:
        if tensor.is_meta:
            deferred.add(original, (tensor, *bounds), options, tensor)
            return tensor
        return original(tensor, *bounds, **options)

    skipped = torch_private.SKIPPED_ON_META
    with torch_private.initialised_by(draw, skipped), _Recording(deferred):
        yield
