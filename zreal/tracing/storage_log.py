"""The life of every storage while a module runs, in order: what was born where, of which operator,
and when it died.

Liveness is seen, not derived: a storage lives until torch lets go of it. One thing is put right:
torch's engine adds the second gradient of a value in place, but not while anybody watches its
dispatcher, so such sums are recognised by their cause (an edge of the autograd graph) and undone.
It must not know strategies.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.fakes import device_kernels
from zreal.tracing.fakes.changed_views import note_views
from zreal.tracing.fakes.dtype_checks import require_one_dtype
from zreal.tracing.fakes.known_values import KnownValues
from zreal.tracing.fakes.real_layouts import call
from zreal.tracing.kernels import base_name, kernel, tensors, written
from zsim.autograd.lowered import Accumulated
from zsim.ir.ops import Kernel
from zsim.models.training_options import Device


class Place(NamedTuple):
    """Where in a step: `backward` or not, and the stretch, by its place in forward: units and what
    lies before, between and after."""

    backward: bool
    stretch: int


START = Place(backward=False, stretch=0)


@dataclass(frozen=True, slots=True)
class Born:
    """A storage of `nbytes`, made by `operator`."""

    storage: int
    nbytes: int
    operator: str


@dataclass(frozen=True, slots=True)
class Died:
    """Nobody holds the storage any more."""

    storage: int


@dataclass(frozen=True, slots=True)
class Summed:
    """The engine has added a gradient to an earlier one of the same value. `earlier`: its storage,
    unless it is a view's."""

    result: int
    earlier: int | None


@dataclass(frozen=True, slots=True)
class Again:
    """A kernel of forward that backward has run once more: it records gradients, which backward
    itself does not."""

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class CalledAgain:
    """A recomputation calls the module of a `unit` that lies in another, or that `returns`."""

    unit: str
    returns: bool


Entry = Born | Died | Summed | Kernel | Again | CalledAgain | Accumulated


class StorageLog(TorchDispatchMode):
    """Logs births, deaths and kernels while active, each with the `place` that is current.

    `ignore` tells of storages that exist already: parameters (by fqn), buffers and inputs. `reads`
    are the parameters that each place reads. `sums_due` is how many of the next additions are the
    engine's own. `device_matters`: bytes were seen that another device would have otherwise.
    """

    def __init__(self, device: Device = "cpu") -> None:
        super().__init__()
        self.device_matters = False
        self._device: Device = device
        self.entries: list[tuple[Place, Entry]] = []
        self.reads: dict[Place, dict[str, None]] = {}
        self.last_read: dict[int, int] = {}
        """By storage: how many entries there were when an operator last read it."""
        self.writes: dict[str, str] = {}
        """The parameters that the step changes in place, each with the operator that does it first.
        """
        self.place = START
        self.sums_due = 0
        self._known = KnownValues()
        self._numbers: dict[int, int] = {}
        self._parameters: dict[int, str] = {}
        self._ignored: set[int] = set()
        self._count = 0

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one if need be."""
        storage = tensor.untyped_storage()
        known = self._numbers.get(id(storage))
        if known is None:
            self._count += 1
            known = self._numbers[id(storage)] = self._count
            weakref.finalize(storage, self._forget, id(storage)).atexit = False
        return known

    def ignore(self, tensor: torch.Tensor, *, parameter: str = "") -> None:
        """A storage that exists before the step, perhaps a parameter's."""
        number = self.number(tensor)
        self._ignored.add(number)
        if parameter:
            self._parameters[number] = parameter

    def restart(self) -> dict[int, Born]:
        """Forget the log; the storages that still live, which from now on are ignored."""
        living = set(self._numbers.values()) - self._ignored
        left = {
            e.storage: e for _, e in self.entries if isinstance(e, Born) and e.storage in living
        }
        self._ignored |= living
        self.entries, self.reads, self.last_read, self.place = [], {}, {}, START
        return left

    def _forget(self, key: int) -> None:
        number = self._numbers.pop(key)
        if number not in self._ignored:
            self.entries.append((self.place, Died(number)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.name().startswith("prim::"):
            return func(*args, **(kwargs or {}))
        # what is asked of tensors from here on is no call of the module's
        with torch_private.unwatched_functions():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        name = func.name()
        for tensor in written(func, args, options):
            if (
                fqn := self._parameters.get(self._numbers.get(id(tensor.untyped_storage()), 0))
            ) is not None:
                self.writes.setdefault(fqn, base_name(name))
        for tensor in tensors((*args, *options.values())):
            number = self._numbers.get(id(tensor.untyped_storage()), 0)
            self.last_read[number] = len(self.entries)
            if (fqn := self._parameters.get(number)) is not None:
                self.reads.setdefault(self.place, {})[fqn] = None
        if (number := self._known.answer(name, args)) is not None:
            return number
        require_one_dtype(base_name(name), tensors(args))
        try:
            result = call(func, args, options, device=self._device)
        except Exception as error:
            raise refusal(name, error) from error
        _require_storages(name, result)
        self._known.follow(func, args, options, result)
        note_views((*args, *options.values()), result)
        self._note(func, args, options, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        operator = base_name(func.name())
        device_kernels.require_known_memory(operator)
        self.device_matters |= operator in device_kernels.SIZED_BY_DEVICE
        for place, tensor in enumerate(tensors(result)):
            before = self._count
            number = self.number(tensor)
            nbytes = device_kernels.result_nbytes(
                operator, args, place, tensor, device=self._device
            )
            if number > before and nbytes:
                self.entries.append((self.place, Born(number, nbytes, operator)))
            elif number > before:
                self._ignored.add(number)
        self._note_scratch(operator, args)
        if self.sums_due and func.name() == "aten::add.Tensor":
            self.sums_due -= 1
            earlier = None if torch_private.is_view(args[0]) else self.number(args[0])
            self.entries.append((self.place, Summed(self.number(result), earlier)))
        work = kernel(func, args, options, result)
        if work is not None:
            again = self.place.backward and torch.is_grad_enabled()
            self.entries.append((self.place, Again(work) if again else work))

    def _note_scratch(self, operator: str, args: tuple[Any, ...]) -> None:
        numbers = []
        for nbytes in device_kernels.scratch(operator, args, device=self._device):
            self._count += 1
            numbers.append(self._count)
            self.entries.append((self.place, Born(self._count, nbytes, operator)))
        self.entries += [(self.place, Died(number)) for number in numbers]


def _require_storages(name: str, result: Any) -> None:
    """UntraceableError for a sparse tensor: how many bytes it has follows from its indices, and it
    has no storage to follow."""
    for tensor in tensors(result):
        if tensor.layout != torch.strided:
            raise UntraceableError(
                where=name,
                expected="dense tensors, whose memory follows from their shapes",
                found=f"one of layout {str(tensor.layout).removeprefix('torch.')}",
                remedy="sparse tensors and gradients are not modelled: use sparse=False in "
                       "nn.Embedding, nn.EmbeddingBag and F.embedding",
            )


_REASONS = {
    "DataDependentOutputException": (
        "operators whose outcome needs no data",
        "give example tensors with values, or do without .item() and the like",
    ),
    "DynamicOutputShapeException": (
        "shapes that follow from those of the inputs", "use masks instead of selections"
    ),
    "UnsupportedOperatorException": (
        "operators that FakeTensorMode knows", "register a fake implementation of it"
    ),
    "NotImplementedError": (
        "operators that FakeTensorMode knows", "register a fake implementation of it"
    ),
}


def refusal(name: str, error: Exception) -> UntraceableError:
    """Why operator `name` stopped the trace."""
    kind = type(error).__name__
    other = ("operators that run on these inputs", "check the shapes and dtypes given")
    foreign = not name.startswith("aten::")
    expected, remedy = _REASONS.get("UnsupportedOperatorException" if foreign else kind, other)
    lines = str(error).strip().splitlines() or [kind]
    return UntraceableError(
        where=name, expected=expected, found=f"{kind}: {lines[0][:200]}", remedy=remedy
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """A log with the engine's sums undone: `same` are storages that are a part of another,
    `used_up` went into a sum."""

    entries: list[tuple[Place, Entry]]
    same: dict[int, int]
    used_up: frozenset[int]

    def final(self, storage: int) -> int:
        """The storage that `storage` has become part of."""
        return _final(storage, self.same)


def merged(entries: list[tuple[Place, Entry]], *, in_place: bool) -> Lives:
    """`entries` with the engine's sums in place where it adds in place: into the earlier gradient,
    if nobody else holds it.

    Then its storage dies as soon as the sum has been made; it is as large as the sum; and it is not
    a view's, whose base would hold it. Otherwise, and always without `in_place`, the sum stays a
    storage of its own. Seen on torch 2.13.
    """
    sizes = {e.storage: e.nbytes for _, e in entries if isinstance(e, Born)}
    same: dict[int, int] = {}
    gone: set[int] = set()
    used_up: set[int] = set()
    for index, (_, entry) in enumerate(entries):
        if not isinstance(entry, Summed):
            continue
        dying = _dying_after(entries, index)
        used_up |= {_final(storage, same) for storage in dying}
        kept = entry.earlier
        if in_place and kept in dying and sizes.get(kept) == sizes.get(entry.result):
            same[entry.result] = kept
            gone.add(dying[kept])
    return Lives(
        entries=[
            (place, Died(_final(entry.storage, same)) if isinstance(entry, Died) else entry)
            for index, (place, entry) in enumerate(entries)
            if index not in gone and not (isinstance(entry, Born) and entry.storage in same)
        ],
        same=same,
        used_up=frozenset(used_up),
    )


def _final(storage: int, same: dict[int, int]) -> int:
    while storage in same:
        storage = same[storage]
    return storage


def _dying_after(entries: list[tuple[Place, Entry]], index: int) -> dict[int, int]:
    """The storages that die before anything else happens, with the places of their deaths in the
    log."""
    dying: dict[int, int] = {}
    for place in range(index + 1, len(entries)):
        entry = entries[place][1]
        if isinstance(entry, Died):
            dying[entry.storage] = place
        elif not isinstance(entry, Kernel) or dying:
            break
    return dying
