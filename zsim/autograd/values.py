"""Values of a model while forward and backward run: their bytes, storages and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from zsim.autograd.aten.call import Call
from zsim.autograd.checkpoint_regions import OperatorCalls
from zsim.autograd.gradients import Gradients
from zsim.autograd.storages import Storages
from zsim.ir.buffers import form_of


@dataclass(slots=True, kw_only=True)
class Values:
    """`nbytes` of each value by name, the values that need a gradient, and the holders of each."""

    gradients: Gradients
    storages: Storages
    nbytes: dict[str, int]
    needs_gradient: set[str] = field(default_factory=set)

    def wants(self, value: str) -> bool:
        """True if `value` needs a gradient."""
        return value in self.needs_gradient

    def hold(self, values: Iterable[str]) -> None:
        """One reference more to each value that has a storage."""
        for value in values:
            if value in self.nbytes:
                self.storages.hold(value)

    def know_again(self, name: str, source: str, nbytes: int) -> None:
        """`name` is another tensor with the data of `source`."""
        self.nbytes[name] = nbytes
        if self.wants(source):
            self.needs_gradient.add(name)

    def drop(self, call: Call) -> None:
        """Release the values that `call` lets go of."""
        for value in call.drops:
            self.storages.release(value)

    def make(
        self, call: Call, *, saving: bool = True, keeping: bool = False,
        pack: Callable[[Call], None] | None = None,
    ) -> None:
        """Run `call`. Without `saving` autograd saves nothing of it; with `keeping` a checkpoint
        still keeps the call's extra outputs. A hook may `pack` what is saved."""
        storages = self.storages
        if call.scratch:
            storages.allocate(form_of(call.output, "scratch"), call.scratch, temporary=True)
        for value in (call.output, *call.also):
            self.nbytes[value] = call.nbytes
            if call.view:
                storages.view(value, call.inputs[0])
            else:
                storages.allocate(value, call.nbytes)
        differentiable = bool(call.parameters or call.weights) or any(
            value in self.needs_gradient for value in call.inputs
        )
        if differentiable:
            self.needs_gradient.update((call.output, *call.also))
            if saving and pack is None:
                self.hold(self.saved(call))
        for name, nbytes in call.keeps:
            storages.allocate(name, nbytes)
        saved = saving and differentiable
        if saved and pack is not None:
            pack(call)
        if pack is not None if saved else not keeping:
            for name, _ in call.keeps:
                storages.release(name)
        if call.scratch:
            storages.release(form_of(call.output, "scratch"))

    def saved(self, call: Call) -> tuple[str, ...]:
        """The values that autograd saves of `call`: a weight's copy only for the gradient of an
        input."""
        if not call.weights or self.needs_gradient.intersection(call.inputs):
            return call.saves
        return tuple(value for value in call.saves if value not in call.weights)

    def release_saved(self, call: Call) -> None:
        """Release what autograd saved of `call`: inputs first, then extra outputs, then the output.
        """
        saved = [name for name in self.saved(call) if name in self.nbytes]
        for name in saved:
            if name != call.output:
                self.storages.release(name)
        for name, _ in call.keeps:
            self.storages.release(name)
        if call.output in saved:
            self.storages.release(call.output)


def last_uses(steps: Iterable[OperatorCalls]) -> dict[str, OperatorCalls]:
    """The last step that reads each value."""
    return {value: step for step in steps for call in step.calls for value in call.inputs}


def dead_after(step: OperatorCalls, last_use: Mapping[str, OperatorCalls]) -> list[str]:
    """The values that Python drops when the operator of `step` returns: those inside it and its
    inputs, unless a later step reads them."""
    inner = [
        value
        for call in step.calls[:-1]
        if not call.cached
        for value in (call.output, *call.also)
    ]
    inner += step.calls[-1].also
    inner = [value for value in inner if last_use.get(value, step) is step]
    outer = [value for call in step.calls for value in call.inputs if last_use[value] is step]
    return list(dict.fromkeys(inner + outer))
