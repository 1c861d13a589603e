"""The life of every storage while a module runs, in order: what was born where, of which operator,
and when it died.

Liveness is observed, not derived: a storage lives until torch frees it. torch's engine adds the
second gradient of a value in place, but not while a mode watches its dispatcher. The log marks such
sums, which `zreal.tracing.gradients.engine_sums` undoes. It must not know strategies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zreal import torch_private
from zreal.tracing.errors import UntraceableError, refuse
from zreal.tracing.fakes import device_kernels, device_nbytes
from zreal.tracing.fakes.changed_views import note_views, require_unchanged
from zreal.tracing.fakes.dtype_checks import require_one_dtype
from zreal.tracing.fakes.known_values import KnownValues
from zreal.tracing.fakes.real_layouts import call, require_known_layout
from zreal.tracing.kernels import base_name, kernel, tensors, written
from zsim.autograd.lowered import Accumulated
from zsim.ir.ops import Kernel
from zsim.models.training_options import Device


class Place(NamedTuple):
    """Place in a step: `backward` or not, and the stretch, counted in forward: units and what lies
    before, between and after."""

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
    """The last reference to the storage is gone."""

    storage: int


@dataclass(frozen=True, slots=True)
class Summed:
    """The engine has added a gradient to an earlier one of the same value. `earlier`: its storage,
    unless it is a view's."""

    result: int
    earlier: int | None


@dataclass(frozen=True, slots=True)
class RecomputedKernel:
    """A kernel of forward that backward has run once more: it records gradients, which backward
    itself does not."""

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class CalledAgain:
    """A recomputation calls the module of a `unit` that lies in another, or that `returns`."""

    unit: str
    returns: bool


Entry = Born | Died | Summed | Kernel | RecomputedKernel | CalledAgain | Accumulated


class StorageLog(TorchDispatchMode):
    """Logs births, deaths and kernels while active, each with the `place` that is current.

    - `ignore` marks storages that exist already: parameters (by fqn), buffers and inputs.
    - `reads`: the parameters that each place reads.
    - `sums_due`: the number of next additions that are the engine's own.
    - `device_matters`: a result has other bytes on another device.
    """

    def __init__(self, device: Device = "cpu") -> None:
        super().__init__()
        self.device_matters = False
        self._device: Device = device
        self.entries: list[tuple[Place, Entry]] = []
        self.reads: dict[Place, dict[str, None]] = {}
        self.last_read: dict[int, int] = {}
        """The number of entries when an operator last read each storage."""
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

    def in_order(self, free: Callable[[], None]) -> None:
        """Call `free` and log what dies by birth, so that a trace is the same each time."""
        before = len(self.entries)
        free()
        self.entries[before:] = sorted(
            self.entries[before:], key=lambda e: e[1].storage if isinstance(e[1], Died) else 0
        )

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
        require_unchanged(name, tensors((*args, *options.values())))
        require_one_dtype(base_name(name), tensors(args))
        require_known_layout(base_name(name), args)
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
        self.device_matters |= operator in device_nbytes.SIZED_BY_DEVICE
        for position, tensor in enumerate(tensors(result)):
            before = self._count
            number = self.number(tensor)
            nbytes = device_nbytes.result_nbytes(
                operator, args, position, tensor, device=self._device
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
        work = kernel(func, args, options, result, device=self._device)
        if work is not None:
            again = self.place.backward and torch.is_grad_enabled()
            self.entries.append((self.place, RecomputedKernel(work) if again else work))

    def _note_scratch(self, operator: str, args: tuple[Any, ...]) -> None:
        numbers = []
        for nbytes in device_nbytes.scratch(operator, args, device=self._device):
            self._count += 1
            numbers.append(self._count)
            self.entries.append((self.place, Born(self._count, nbytes, operator)))
        self.entries += [(self.place, Died(number)) for number in numbers]


def _require_storages(name: str, result: Any) -> None:
    """UntraceableError for a sparse tensor: how many bytes it has follows from its indices, and it
    has no storage to follow."""
    for tensor in tensors(result):
        if tensor.layout != torch.strided:
            raise refuse(
                name, "dense tensors, whose memory follows from their shapes",
                f"one of layout {str(tensor.layout).removeprefix('torch.')}",
                "sparse tensors and gradients are not modelled: use sparse=False in "
                "nn.Embedding and F.embedding",
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
    """UntraceableError for the operator `name`, from the `error` that stopped the trace."""
    kind = type(error).__name__
    other = ("operators that run on these inputs", "check the shapes and dtypes given")
    foreign = not name.startswith("aten::")
    expected, remedy = _REASONS.get("UnsupportedOperatorException" if foreign else kind, other)
    lines = str(error).strip().splitlines() or [kind]
    return UntraceableError(
        where=name, expected=expected, found=f"{kind}: {lines[0][:200]}", remedy=remedy
    )
