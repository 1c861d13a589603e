"""Lowering of each module by itself: memory events of its forward and backward, and kernels.

`zsim.autograd.lowering.module_calls` gives the modules, `zsim.autograd.tape` follows their memory.
`zsim.autograd.lowering.lower_model` lowers only a few of many equal modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zsim.autograd.aten.call import Call
from zsim.autograd.checkpoint_regions import OperatorCalls
from zsim.autograd.lowered import (
    Computation,
    HostCopies,
    LoweredModule,
    Recomputed,
    TapeEvent,
)
from zsim.autograd.lowering.module_calls import (
    ModulePart,
    blocks,
    cut_regions,
    maker_of_calls,
    parts_of,
)
from zsim.autograd.lowering.module_kernels import backward_kernels, forward_kernels
from zsim.autograd.tape import SEED, Tape
from zsim.ir.buffers import sum_of_losses
from zsim.ir.ops import Free, MemoryEvent
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import Batch, Device, SavedTensorsHook


def lower_each(
    model: ModelSpec,
    *,
    batch: Batch,
    dtype: str,
    casts_input: bool = False,
    device: Device = "cpu",
    checkpointing: Checkpointing = NO_CHECKPOINTING,
    checkpointed: frozenset[str] = frozenset(),
    autocast: str = "none",
    leaves: bool = True,
    saving: SavedTensorsHook | None = None,
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and
    backward.

    `casts_input`: a floating-point model input is cast to `dtype` first and the copy kept as long
    as autograd needs it. Modules in `checkpointed` recompute what `checkpointing` says. `autocast`
    is the dtype of torch.autocast around forward, and caches casts of parameters that are `leaves`.
    A hook may be `saving` tensors in host memory.
    The loss is freed with the last event of the last backward, that of the first module that has
    one, as in `loss.backward(); del loss`.
    """
    tape = Tape(in_place=device == "cuda", saving=saving)
    tape.know_parameters(model, dtype=dtype, casts_once=autocast != "none" and leaves)
    uncached = (
        model.frozen if leaves else frozenset([parameter.fqn for parameter in model.parameters])
    )
    make = maker_of_calls(autocast, batch=batch, dtype=dtype, device=device, uncached=uncached)
    parts = list(parts_of(model, make, dtype=dtype))
    for block in blocks(parts):
        if block[0].block in checkpointed:
            cut_regions(block, checkpointing, packs=saving is not None)
    forward = _Forward(tape, model, parts, batch=batch, dtype=dtype, casts_input=casts_input)
    ran = list(forward.run())
    let_go = {each.part.module.fqn: tape.let_go(each.part.steps) for each in ran}
    tape.seed(forward.losses)
    last = next(each for each in ran if each.differentiates)
    backward = _Backward(
        tape, dtype=dtype, parameters={parameter.fqn: parameter for parameter in model.parameters}
    )
    lowered = []
    for each in reversed(ran):
        loss = sum_of_losses(forward.losses[-1], len(forward.losses))
        ends = (SEED, loss) if each is last else ()
        lowered.append(
            backward.run(each, ends=ends, freed_with_autocast_cache=let_go[each.part.module.fqn])
        )
    return tuple(reversed(lowered))


class _Ran(NamedTuple):
    """A part after forward: its memory events, and those of the sum of losses. Its input
    `needs_gradient`; it `differentiates` if an output does."""

    part: ModulePart
    memory: tuple[TapeEvent, ...]
    needs_gradient: bool
    differentiates: bool
    sums_losses: tuple[MemoryEvent, ...]
    copies: HostCopies


class _Forward:
    """All forwards of a model, part by part. `losses` are the values that they end with."""

    def __init__(
        self, tape: Tape, model: ModelSpec, parts: Sequence[ModulePart], *, batch: Batch,
        dtype: str,
        casts_input: bool,
    ) -> None:
        self.tape, self.model, self.parts, self.losses = tape, model, parts, list[str]()
        self._size = len(model.modules) // model.forwards
        self._casts = casts_input and "tokens" not in model.first_operator.inputs
        self._batch, self._dtype, self._source = batch, dtype, ""
        self._framed = frozenset(
            [
                drop
                for module in model.modules
                for op in module.operators
                for drop in op.drops
                if ":" in drop
            ]
        )
        self._over, self._drops = dict[str, list[OperatorCalls]](), dict[str, frozenset[str]]()
        for block in blocks(parts):
            self._drops[block[0].module.whole] = frozenset(
                [drop for part in block for drop in part.drops]
            )
            self._over[block[-1].module.fqn] = [step for part in block for step in part.steps]

    def run(self) -> Iterator[_Ran]:
        """Each part after it has run."""
        for index, part in enumerate(self.parts):
            if index % self._size == 0:
                self._begin(part.called)
            yield self._run(part, is_end=(index + 1) % self._size == 0)

    def _begin(self, source: str) -> None:
        """A forward that is called with `source`."""
        self._source = source
        if self._casts:
            self.tape.cast_input(self.model, source, batch=self._batch, dtype=self._dtype)

    def _run(self, part: ModulePart, *, is_end: bool) -> _Ran:
        tape = self.tape
        tape.framed = self._framed.union(self._drops[part.module.whole])
        needs_gradient = part.taken in tape.values.needs_gradient
        carries_gradient = not part.steps and part.entry in tape.values.needs_gradient
        tape.run_forward(
            part.steps, entry=part.taken, later=part.later, over=self._over.get(part.module.fqn, ())
        )
        if is_end:
            tape.end_forward(self._source)
        memory = tape.values.storages.take()
        differentiates = carries_gradient or any(
            call.output in tape.values.needs_gradient for step in part.steps for call in step.calls
        )
        return _Ran(
            part=part,
            memory=memory,
            needs_gradient=needs_gradient,
            differentiates=differentiates,
            sums_losses=self._end(part.makes) if is_end else (),
            copies=tape.take_copies(),
        )

    def _end(self, loss: str) -> tuple[MemoryEvent, ...]:
        """Memory events of adding `loss` to those of earlier forwards."""
        self.losses.append(loss)
        return self.tape.sum_losses(self.losses)


class _Backward:
    """The backward of a model, part by part from the last."""

    def __init__(self, tape: Tape, *, dtype: str, parameters: Mapping[str, Parameter]) -> None:
        self.tape, self.dtype, self._parameters, self._added = (
            tape, dtype, parameters, Counter[str](),
        )

    def run(
        self, ran: _Ran, *, ends: Iterable[str], freed_with_autocast_cache: tuple[Free, ...]
    ) -> LoweredModule:
        """The module that `ran`, lowered; its backward ends with the release of the storages
        `ends`."""
        tape, part, module = self.tape, ran.part, ran.part.module
        recomputed = tape.run_backward(
            part.steps, bound=part.taken if module.inside and ran.needs_gradient else ""
        )
        for name in ends:
            tape.values.storages.release(name)
        memory = _last_mark_only(tape.values.storages.take())
        tape.values.gradients.pass_on()
        calls = [call for step in part.steps for call in step.calls]
        again = [call for region in reversed(recomputed) for call in region.kernels]
        return LoweredModule(
            fqn=module.fqn,
            unit=module.unit,
            forward=Computation(
                kernels=forward_kernels(calls, dtype=self.dtype), memory=ran.memory,
                copies=ran.copies,
            ),
            backward=self._computation(calls, memory),
            events_after_hook=tape.values.storages.take(),
            input_needs_gradient=ran.needs_gradient,
            recompute=forward_kernels(again, dtype=self.dtype),
            differentiates=ran.differentiates,
            input_buffer=part.taken if module.within else "",
            sums_losses=ran.sums_losses,
            freed_with_autocast_cache=freed_with_autocast_cache,
            returns_inner_output=not part.steps,
        )

    def _computation(self, calls: Sequence[Call], memory: tuple[TapeEvent, ...]) -> Computation:
        kernels = backward_kernels(
            calls,
            dtype=self.dtype,
            needs_gradient=self.tape.values.needs_gradient,
            nbytes=self.tape.values.nbytes,
            parameters=self._parameters,
            made=self._added,
        )
        return Computation(
            kernels=tuple(kernels), memory=memory, copies=self.tape.take_copies()
        )


def _last_mark_only(events: tuple[TapeEvent, ...]) -> tuple[TapeEvent, ...]:
    """`events` with the last of several marks only."""
    marks = [index for index, event in enumerate(events) if isinstance(event, Recomputed)]
    return (
        tuple(event for index, event in enumerate(events) if index not in marks[:-1])
        if marks
        else events
    )
