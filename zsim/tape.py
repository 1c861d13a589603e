"""What eager autograd keeps, when it lets go, and in which order: memory events of each module's forward and backward.

A liveness simulation over the calls of `zsim.eager`, by counting references to storages as torch does: Python holds a value until its
last use (a module's input until the module has returned), autograd holds what it saved until the node has run
backward, and the engine holds gradients. It knows no strategy and no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.eager import Call, calls
from zsim.model import ModelSpec, Module
from zsim.ops import Alloc, Free, Kernel
from zsim.training import DTYPE_NBYTES, Batch, Computation, Device, LoweredModule, ParameterGradient, TapeEvent

SEED = "loss:seed"


@dataclass(slots=True)
class _Storages:
    """References to each live storage; a storage is freed, as an event, when its last reference goes."""

    events: list[TapeEvent] = field(default_factory=list)
    references: dict[str, int] = field(default_factory=dict)

    def allocate(self, name: str, nbytes: int, *, temporary: bool = False) -> None:
        self.events.append(Alloc(name, "temporaries" if temporary else "activations", nbytes))
        self.references[name] = 1

    def hold(self, name: str) -> None:
        self.references[name] += 1

    def release(self, name: str) -> None:
        left = self.references[name] - 1
        if left:
            self.references[name] = left
            return
        del self.references[name]
        self.events.append(Free(name))

    def take(self) -> tuple[TapeEvent, ...]:
        events, self.events = tuple(self.events), []
        return events


@dataclass(slots=True)
class _Tape:
    """The state of one forward and backward over the whole model."""

    nbytes: dict[str, int] = field(default_factory=dict)
    needs_gradient: set[str] = field(default_factory=set)
    storages: _Storages = field(default_factory=_Storages)
    gradients: dict[str, str] = field(default_factory=dict)
    births: dict[str, int] = field(default_factory=dict)

    def run_forward(self, steps: list[list[Call]], *, entry: str) -> None:
        """`steps` are the calls of each operator. Values inside an operator go when it returns, its inputs after
        their last use; `entry`, the module's input, is its caller's until the module returns."""
        last_use = {value: step for step in steps for call in step for value in call.inputs}
        for step in steps:
            for call in step:
                self._make(call)
            inner = [call.output for call in step[:-1]]
            outer = [value for call in step for value in call.inputs if last_use[value] is step]
            for value in dict.fromkeys(inner + outer):
                if value != entry and value in self.nbytes:
                    self.storages.release(value)
        if entry in self.nbytes:
            self.storages.release(entry)

    def _make(self, call: Call) -> None:
        if call.scratch:
            self.storages.allocate(f"{call.output}.scratch", call.scratch, temporary=True)
        self.nbytes[call.output] = call.nbytes
        self.storages.allocate(call.output, call.nbytes)
        wants = bool(call.parameters) or any(value in self.needs_gradient for value in call.inputs)
        if wants:
            self.needs_gradient.add(call.output)
            for value in call.saves:
                if value in self.nbytes:
                    self.storages.hold(value)
            for name, nbytes in call.keeps:
                self.storages.allocate(name, nbytes)
        if call.scratch:
            self.storages.release(f"{call.output}.scratch")

    def cast_input(self, model: ModelSpec, *, batch: Batch, dtype: str) -> None:
        """The model's floating-point input in `dtype`; Python's reference goes when the first module returns."""
        tokens = batch.micro_batch * batch.sequence_length
        self.nbytes["x"] = tokens * model.modules[0].operators[0].in_features * DTYPE_NBYTES[dtype]
        self.storages.allocate("x", self.nbytes["x"])

    def run_backward(self, module_calls: list[Call]) -> None:
        for call in reversed(module_calls):
            if call.output in self.needs_gradient:
                self._differentiate(call)

    def _differentiate(self, call: Call) -> None:
        gradient = self.gradients.pop(call.output)
        if call.backward_scratch:
            self.storages.allocate(f"{call.output}.backward_scratch", call.backward_scratch, temporary=True)
        parts: list[tuple[str, str]] = []
        for name in call.gradients:
            if name in call.parameters:
                self.storages.events.append(ParameterGradient(name))
            elif name in self.needs_gradient:
                parts.append((name, self._new_gradient(name)))
        if call.backward_scratch:
            self.storages.release(f"{call.output}.backward_scratch")
        for name in call.passes:
            if name in self.needs_gradient:
                self.storages.hold(gradient)
                parts.append((name, gradient))
        self.storages.release(gradient)
        for name in call.saves:
            if name in self.nbytes:
                self.storages.release(name)
        for name, _ in call.keeps:
            self.storages.release(name)
        for name, part in parts:
            self._accumulate(name, part)

    def _new_gradient(self, value: str) -> str:
        self.births[value] = self.births.get(value, 0) + 1
        name = f"{value}.grad{self.births[value]}"
        self.storages.allocate(name, self.nbytes[value], temporary=True)
        return name

    def _accumulate(self, value: str, part: str) -> None:
        """The engine's input buffer: a second gradient is added in place if nobody else holds the first."""
        if value not in self.gradients:
            self.gradients[value] = part
            return
        first = self.gradients[value]
        if self.storages.references[first] == 1:
            self.storages.release(part)
        elif self.storages.references[part] == 1:
            self.storages.release(first)
            self.gradients[value] = part
        else:
            self.gradients[value] = self._new_gradient(value)
            self.storages.release(first)
            self.storages.release(part)


def _qualified(call: Call, module: Module, entry: str) -> Call:
    """`call` with module-local value names made unique in the model; the module's input is called `entry`."""
    prefix, parameters = f"{module.fqn}:", call.parameters

    def names(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([v if v in parameters else entry if v == "x" else prefix + v for v in values])

    return Call(
        operator=call.operator,
        inputs=names(call.inputs),
        output=prefix + call.output,
        nbytes=call.nbytes,
        saves=names(call.saves),
        keeps=tuple([(prefix + value, nbytes) for value, nbytes in call.keeps]),
        scratch=call.scratch,
        backward_scratch=call.backward_scratch,
        gradients=names(call.gradients),
        passes=names(call.passes),
        parameters=parameters,
        flops=call.flops,
        backward_flops=call.backward_flops,
        moved=call.moved,
        backward_moved=call.backward_moved,
    )


def _forward_kernels(module_calls: list[Call], *, dtype: str) -> tuple[Kernel, ...]:
    return tuple(Kernel(call.operator, call.flops, call.moved, dtype) for call in module_calls)


def _backward_kernels(module_calls: list[Call], *, dtype: str, needs_gradient: set[str]) -> tuple[Kernel, ...]:
    """In reverse order. A call whose inputs need no gradient makes only its parameters' gradients: half of the products."""
    return tuple(
        Kernel(
            call.operator,
            call.backward_flops if needs_gradient.intersection(call.inputs) else call.backward_flops // 2,
            call.backward_moved,
            dtype,
        )
        for call in reversed(module_calls)
    )


def lower_each(
    model: ModelSpec, *, batch: Batch, dtype: str, casts_input: bool = False, device: Device = "cpu"
) -> tuple[LoweredModule, ...]:
    """Every module of `model` with the kernels and memory events of one micro-batch's forward and backward.

    `casts_input`: a floating-point model input is cast to `dtype` first and the copy kept as long as autograd needs it.
    The loss is freed with the last event of the first module's backward, as in `loss.backward(); del loss`.
    """
    tape = _Tape()
    entry = "x"
    traced: list[tuple[Module, list[Call], tuple[TapeEvent, ...], bool]] = []
    for module in model.modules:
        steps = [
            [_qualified(call, module, entry) for call in calls(operator, batch=batch, dtype=dtype, device=device)]
            for operator in module.operators
        ]
        module_calls = [call for step in steps for call in step]
        if casts_input and not traced and any("x" in call.inputs for call in module_calls):
            tape.cast_input(model, batch=batch, dtype=dtype)
        needs_gradient = entry in tape.needs_gradient
        tape.run_forward(steps, entry=entry)
        traced.append((module, module_calls, tape.storages.take(), needs_gradient))
        entry = module_calls[-1].output
    tape.storages.allocate(SEED, tape.nbytes[entry], temporary=True)
    tape.storages.hold(SEED)
    tape.gradients[entry] = SEED
    lowered = []
    for module, module_calls, forward_memory, needs_gradient in reversed(traced):
        tape.run_backward(module_calls)
        if module is model.modules[0]:
            tape.storages.release(SEED)
            tape.storages.release(entry)
        lowered.append(
            LoweredModule(
                fqn=module.fqn,
                unit=module.unit,
                forward=Computation(kernels=_forward_kernels(module_calls, dtype=dtype), memory=forward_memory),
                backward=Computation(
                    kernels=_backward_kernels(module_calls, dtype=dtype, needs_gradient=tape.needs_gradient),
                    memory=tape.storages.take(),
                ),
                input_needs_gradient=needs_gradient,
            )
        )
    return tuple(reversed(lowered))
