"""Recorder of a step in time: when the host issued each collective, when it ran, and when each unit
computed.

It sees c10d operators and the boundaries of units, and no other operator, so that the step goes on
as without it. Collectives that the host waits for keep compute from running; those intervals are
cut out of the units'. It must not know strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zreal import torch_private
from zreal.meters.clocks import StepClock
from zreal.meters.collectives import C10D_OPS
from zsim.ir.run import CollectiveRecord
from zsim.models.spec import ROOT

Describe = Callable[[str, tuple[Any, ...]], CollectiveRecord | None]


@dataclass(slots=True)
class MarkedCall:
    """One collective: its record, when the host issued it, and moments around its run."""

    record: CollectiveRecord
    issued_ns: int
    begun: Any
    ended: Any = None


@dataclass(slots=True)
class Mark:
    """The moment from which on the compute stream works on `kind` of `unit`; "" for neither."""

    moment: Any
    issued_ns: int
    kind: str
    unit: str


@dataclass(slots=True)
class StepMarks:
    """All that was recorded of one step, in the order of the host."""

    calls: list[MarkedCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Moments between which the compute stream waited for a collective."""
    step_ns: int = 0


@dataclass(slots=True, kw_only=True)
class TimelineRecorder:
    """Records steps while it is `active`.

    `units`: the modules of each unit by its fqn; `root` is the module that has them. `describe`
    makes the record of a c10d operator of its name and arguments.
    """

    root: nn.Module
    units: Mapping[str, Sequence[nn.Module]]
    describe: Describe
    clock: StepClock
    step: StepMarks = field(default_factory=StepMarks)
    _open: list[str] = field(default_factory=list)
    """Units whose forward runs, from the outermost on."""
    _first: str = ""
    """The unit that forward began with; what is left in backward after it is the root's."""
    _between: bool = False
    """True between the end of a unit's forward and the next mark."""
    _backward: bool = False
    _pending: list[tuple[dist.Work, MarkedCall]] = field(default_factory=list)
    """Works that had not ended when they were last asked. gloo's threads are not asked to tell:
    they would wait for the interpreter, and it for them."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, steps are recorded."""
        with ExitStack() as stack:
            stack.enter_context(torch_private.c10d_calls(C10D_OPS, self._collective))
            for unit, modules in {ROOT: (self.root,), **self.units}.items():
                for module in modules:
                    for handle in self._watch(unit, module):
                        stack.callback(handle.remove)
            for handle in (
                register_optimizer_step_pre_hook(lambda *_: self._mark("optimizer", ROOT)),
                register_optimizer_step_post_hook(lambda *_: self._mark()),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self._waits_seen())
            stack.enter_context(self._root_parts_seen())
            yield

    def recorded(self, step: Callable[[], object]) -> StepMarks:
        """The marks of one call of `step`, at whose end the device has done all."""
        self.step = StepMarks()
        self._open, self._first, self._backward, self._pending = [], "", False, []
        self.clock.start()
        step()
        end = self.clock.now()
        if self.clock.overlaps:
            torch.cuda.synchronize()
        self.step.step_ns = max(1, self.clock.ns(end))
        return self.step

    def _mark(self, kind: str = "", unit: str = "") -> None:
        self._between = False
        now = self.clock.now()
        self._ask(now)
        self.step.marks.append(Mark(now, self.clock.host_ns(), kind, unit))

    def _watch(self, unit: str, module: nn.Module) -> Iterator[Any]:
        """The hooks of a module: after FSDP's own before its forward, when parameters are whole,
        and before FSDP's own after it, when they still are."""
        yield module.register_forward_pre_hook(partial(self._before, unit))
        yield module.register_forward_hook(partial(self._after, unit), prepend=True)
        yield module.register_forward_hook(partial(self._follow, unit))

    def _before(self, unit: str, module: nn.Module, arguments: Any) -> None:
        if self._backward:  # activation checkpointing calls it again
            self._mark("recompute", unit)
            return
        if unit != ROOT:
            self._first = self._first or unit
            self._on_gradient(arguments, partial(self._left, unit))
        self._forget_between()
        self._open.append(unit)
        self._mark("forward", unit)

    def _after(self, unit: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._backward or not self._open:
            return
        self._open.pop()
        self._mark(*(("forward", self._open[-1]) if self._open else ()))
        self._between = True

    def _forget_between(self) -> None:
        """Take time between two units from the root: it is their wrapper's."""
        last = self.step.marks[-1] if self.step.marks else None
        if last and self._between:
            last.kind = last.unit = ""

    def _follow(self, unit: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if not self._backward:
            self._on_gradient(output, partial(self._reached, unit))

    def _on_gradient(self, value: Any, then: Callable[[], None]) -> None:
        """Call `then` in backward when the gradient of the first tensor of `value` is there."""
        tensor = next((each for each in _tensors(value) if each.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda _: then())

    def _reached(self, unit: str) -> None:
        """Backward comes to `unit`."""
        if not self._backward:
            self._backward = True
            torch_private.when_backward_ends(self._backward_over)
        self._mark("backward", unit)

    def _left(self, unit: str) -> None:
        """Backward has the gradient of the input of `unit`, which may be another one's output."""
        last = self.step.marks[-1]
        if (last.kind, last.unit) == ("backward", unit):
            self._mark(*(("backward", ROOT) if unit == self._first else ()))

    def _backward_over(self) -> None:
        self._mark()
        # DDP waits for its buckets in a callback of its own, queued before this second one
        torch_private.when_backward_ends(self._reductions_over)

    def _reductions_over(self) -> None:
        self._backward, self._first = False, ""
        self._mark()

    @contextmanager
    def _root_parts_seen(self) -> Iterator[None]:
        """Inside, the root's own parts are marked where an interpreter runs them one by one."""
        run = getattr(self.root, "run", None)
        if run is None:
            yield
            return

        def watched(module: Any, x: Tensor, *rest: Any) -> Any:
            if module.unit != ROOT:
                return run(module, x, *rest)
            self._before(ROOT, self.root, ())
            output = run(module, x, *rest)
            self._after(ROOT, self.root, (), output)
            self._follow(ROOT, self.root, (), output)
            return output

        cast(Any, self.root).run = watched
        try:
            yield
        finally:
            del cast(Any, self.root).run

    @contextmanager
    def _waits_seen(self) -> Iterator[None]:
        """Inside, waits for works of collectives are recorded."""
        original: Any = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            before = self.clock.now()
            answer = original(work, *arguments, **options)
            after = self.clock.now()
            if self.clock.on_compute_stream():
                self.step.waits.append((before, after))
            self._ask(after, ended=work)
            return answer

        dist.Work.wait = wait  # type: ignore[assignment, method-assign]
        try:
            with self._stream_waits_seen() if self.clock.overlaps else nullcontext():
                yield
        finally:
            dist.Work.wait = original  # type: ignore[method-assign]

    @contextmanager
    def _stream_waits_seen(self) -> Iterator[None]:
        """Inside, waits of the compute stream for events of others are recorded, as FSDP2 and our
        executor wait for collectives."""
        original: Any = torch.cuda.Stream.wait_event

        def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
            if not self.clock.on_compute_stream() or stream != torch.cuda.current_stream():
                original(stream, event)
                return
            before = self.clock.now()
            original(stream, event)
            self.step.waits.append((before, self.clock.now()))

        torch.cuda.Stream.wait_event = wait_event  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.cuda.Stream.wait_event = original  # type: ignore[method-assign]

    def _collective(
        self, name: str, arguments: tuple[Any, ...], carry_out: Callable[[], Any]
    ) -> Any:
        record = self.describe(name, arguments)
        if record is None:
            return carry_out()
        call = MarkedCall(record, self.clock.host_ns(), self.clock.now())
        self.step.calls.append(call)
        result = carry_out()
        works = torch_private.works(result)
        if not self.clock.overlaps:
            self.step.waits.append((call.begun, self.clock.now()))
            self._pending += [(work, call) for work in works]
            return result
        for work in works:  # called at once, on a stream that waits for the collective
            work.get_future().add_done_callback(partial(self._ended, call))
        if not works:  # it ran on the current stream
            call.ended = self.clock.now()
            if self.clock.on_compute_stream():
                self.step.waits.append((call.begun, call.ended))
        return result

    def _ended(self, call: MarkedCall, _: Any) -> None:
        call.ended = self.clock.now()

    def _ask(self, now: Any, *, ended: dist.Work | None = None) -> None:
        """Note which works have ended by `now`; the one that the host waited for has."""
        for work, call in self._pending:
            if work is ended or work.is_completed():
                call.ended = now
        if self._pending:
            self._pending = [each for each in self._pending if each[1].ended is None]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
