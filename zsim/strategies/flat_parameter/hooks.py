"""FSDP1's hooks: the order in which a forward and a backward gather, free and reduce.

Hooks on the output of a unit begin its backward, once until it runs forward again. A hook on the
accumulator of a flat parameter ends it, when the views of all its runs have their gradients. A
frozen one has no accumulator. There a hook on the input of the unit's first run ends it, or the end
of backward. See torch/distributed/fsdp/_runtime_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from zsim.autograd.lowered import LoweredModule
from zsim.models.spec import ROOT, run_of
from zsim.strategies.building.training import Training
from zsim.strategies.flat_parameter.flat_parameter import FlatParameter
from zsim.strategies.flat_parameter.flat_parameter_step import FlatParameterStep
from zsim.strategies.fsdp.hook_events import (
    HookEvents,
    ModuleRun,
    PostBackward,
    PostForward,
    PreBackward,
    PreForward,
    hook_events,
)


@dataclass(slots=True, kw_only=True)
class Order:
    """Orders in which flat parameters were used; FSDP1 prefetches others by them."""

    forward: list[FlatParameter] = field(default_factory=list)
    """Order in which the first micro-batch of all gathered them in forward; nothing later changes
    it."""
    learns: bool = True
    ended: list[FlatParameter] = field(default_factory=list)
    """Order in which their forwards have ended in this micro-batch, one that ran twice twice."""

    def begin(self, flat: FlatParameter) -> None:
        """A unit's forward begins."""
        if self.learns and flat not in self.forward:
            self.forward.append(flat)

    def end(self, flat: FlatParameter) -> None:
        """A unit's forward ends. Its first one counts, but torch takes the place 0 for none."""
        if not flat.post_forward_index:
            flat.post_forward_index = len(self.ended)
        self.ended.append(flat)

    def after(self, flat: FlatParameter) -> FlatParameter | None:
        """The one that forward gathers after `flat`, if that is known and is not there already."""
        index = self.forward.index(flat) + 1
        candidate = self.forward[index] if index < len(self.forward) else None
        awaits = candidate is not None and candidate.awaits_forward
        return candidate if awaits and candidate and not candidate.prefetched else None

    def before(self, flat: FlatParameter) -> FlatParameter | None:
        """The one whose forward ended before that of `flat`, unless it has begun backward or is
        there already."""
        candidate = self.ended[flat.post_forward_index - 1] if flat.post_forward_index else None
        awaits = candidate is not None and candidate.awaits_backward
        return candidate if awaits and candidate and not candidate.prefetched else None

    def end_micro_batch(self) -> None:
        """The first order of forward is known; that of this micro-batch is over."""
        self.learns = False
        self.ended = []


@dataclass(frozen=True, slots=True)
class Units:
    """Hooks of units, with the modules at which they fire, and what autograd meets of each run."""

    events: HookEvents
    places: dict[str, int]
    """Index of each module in the micro-batch's forwards."""
    differentiated: frozenset[str]
    """The first modules of those runs of units that go into the loss, with the units in them."""

    @classmethod
    def of(cls, training: Training) -> Units:
        """The units of the model; each but the root's is one module, whole or in parts."""
        events = hook_events(training, [unit.fqn for unit in training.model.units])
        return cls(
            events=events,
            places={module.fqn: index for index, module in enumerate(training.modules)},
            differentiated=frozenset(_differentiated(training.modules, events)),
        )


def _differentiated(modules: Iterable[LoweredModule], events: HookEvents) -> Iterator[str]:
    """The modules that begin a run of which some module differentiates; a unit's first part may be
    empty."""
    running = list[str]()
    for module in modules:
        running += [module.fqn] if module.fqn in events.begins else []
        yield from running if module.differentiates else ()
        del running[len(running) - (module.fqn in events.ends) :]


@dataclass(frozen=True, slots=True)
class Split:
    """The node of autograd that cuts a flat parameter into the views of a run; forward makes it
    before the module at `place`."""

    flat: FlatParameter
    run: int
    module_index: int


@dataclass(slots=True, kw_only=True)
class MicroBatchHooks:
    """The forwards and the backward of one micro-batch."""

    step: FlatParameterStep
    flats: dict[str, FlatParameter]
    units: Units
    order: Order
    frees: bool
    """Blocks are freed after forward."""
    keeps_views: bool
    """Original parameters stay views of unsharded storage that forward does not free."""
    backward_prefetch: Literal["pre", "post", "none"]
    forward_prefetch: bool
    sync: bool
    splits: list[Split] = field(default_factory=list)
    """Views of runs in the order of forward; backward comes to them from the last to the first."""
    leaving: list[FlatParameter] = field(default_factory=list)
    """Flat parameters without an accumulator whose backward is over, until the next node of
    autograd."""

    def forward(self, modules: tuple[LoweredModule, ...]) -> None:
        """Gather each unit before its first module and free it after its last, the root around
        them.

        With forward_prefetch the unit before gathers it.
        """
        for flat in self.flats.values() if self.forward_prefetch else ():
            flat.awaits_forward, flat.prefetched = True, False
        self.step.begin_forward()
        self.step.cast_input(modules)
        for event in self.units.events.forward(modules):
            match event:
                case PreForward(unit, module):
                    self._pre_forward(self.flats[unit], module)
                case ModuleRun(module):
                    self.step.forward(module)
                case PostForward(unit, module, at_root):
                    # hooks are put on what is detached too
                    flat = self.flats[unit]
                    differentiates = at_root or module.differentiates or flat.trained
                    self._post_forward(flat, differentiates=differentiates)
        self.step.make_loss(modules)

    def backward(self) -> None:
        """Each unit is gathered if need be and runs; once autograd has split its views' gradients
        off, it is freed and reduces."""
        self.step.begin_backward()
        if ROOT in self.flats and not self.step.training.modules[-1].after_root:
            self._pre_backward(self.flats[ROOT])
        for event in self.units.events.backward():
            match event:
                case PreBackward(unit, module):
                    self._split_backward(after=self.units.places[module.fqn])
                    self._pre_backward(self.flats[unit])
                case ModuleRun(module):
                    self._split_backward(after=self.units.places[module.fqn])
                    self._leave(module)
                    self.step.backward(module)
                case PostBackward(unit, module) if not self.flats[unit].trained:
                    # the hook is on what its first run was given
                    self.leaving[:0] = [self.flats[unit]] if not run_of(module.fqn) else []
        self._split_backward()
        if self.sync:
            self.step.wait_for_reductions()
        self._finish()
        self.step.release_loss()

    def _leave(self, module: LoweredModule) -> None:
        """Reshard the units that autograd has left, unless `module` is no node of autograd: part of
        a unit that only frees values."""
        if module.forward.kernels:
            for flat in self.leaving:
                self._reshard(flat)
            self.leaving = []

    def _pre_forward(self, flat: FlatParameter, module: LoweredModule) -> None:
        """Gather, and make views; `module` is the first that runs then."""
        self.order.begin(flat)
        if not flat.prefetched:
            self._unshard_in_forward(flat, module)
        flat.awaits_forward = False
        if flat.trained and flat.fqn != ROOT and module.fqn not in self.units.differentiated:
            self._drop_split(flat)
        self.step.wait_for_unshard()
        following = self.order.after(flat) if self.forward_prefetch else None
        if following is not None:
            self._unshard_in_forward(following, module)
            following.prefetched = True

    def _unshard_in_forward(self, flat: FlatParameter, module: LoweredModule) -> None:
        self.step.unshard(flat)
        flat.runs += 1
        if flat.trained:
            flat.splits += 1
            self.splits.append(Split(flat, flat.runs, self.units.places[module.fqn]))

    def _drop_split(self, flat: FlatParameter) -> None:
        """Nothing of the run that now begins goes into the loss, so that autograd does not come to
        its views."""
        last = max(index for index, split in enumerate(self.splits) if split.flat is flat)
        del self.splits[last]
        flat.splits -= 1

    def _post_forward(self, flat: FlatParameter, *, differentiates: bool) -> None:
        """Free, and wait for the gradient of the unit's output, if it needs one."""
        self.order.end(flat)
        self.step.reshard(flat, free=self.frees and flat.fqn != ROOT, keeps_views=self.keeps_views)
        flat.awaits_backward, flat.entered = differentiates, False

    def _pre_backward(self, flat: FlatParameter) -> None:
        if flat.entered:
            return
        flat.entered = True
        if not flat.prefetched:
            self.step.unshard(flat)
        self.step.wait_for_unshard()
        flat.awaits_backward = False
        if self.backward_prefetch == "pre":
            self._prefetch_before(flat)

    def _prefetch_before(self, flat: FlatParameter) -> None:
        before = self.order.before(flat)
        if before is not None:
            self.step.unshard(before)
            before.prefetched = True

    def _split_backward(self, *, after: int = -1) -> None:
        """Autograd comes to what forward made `after` the module at this place began; a flat
        parameter's last split ends it."""
        while self.splits and self.splits[-1].module_index > after:
            split = self.splits.pop()
            split.flat.splits -= 1
            self.step.concatenate_gradients(split.flat, run=split.run)
            if not split.flat.splits:
                self._post_backward(split.flat)

    def _post_backward(self, flat: FlatParameter) -> None:
        self._reshard(flat)
        if self.sync:
            self.step.reduce(flat)
        else:
            self.step.accumulate_without_sync(flat)

    def _reshard(self, flat: FlatParameter) -> None:
        """A unit's backward is over. Without a reduction, blocks that forward kept are kept on."""
        self.step.reshard(flat, free=self.sync or self.frees)
        if self.backward_prefetch == "post":
            self._prefetch_before(flat)

    def _finish(self) -> None:
        """The root's final callback: what is still unsharded is resharded, and nothing is awaited
        any more."""
        for flat in self.flats.values():
            if flat.in_use:
                self.step.reshard(flat, free=self.sync or self.frees)
            flat.awaits_backward = flat.prefetched = flat.entered = False
            flat.post_forward_index, flat.runs = None, 0
        self.order.end_micro_batch()
