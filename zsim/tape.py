"""What eager autograd keeps, when it lets go, and in which order: memory events of each module's forward and backward.

A liveness simulation over the calls of `zsim.eager`, by counting references to storages as torch does: Python holds a value until its
last use (a module's input until the module has returned), autograd holds what it saved until the node has run
backward, and the engine holds gradients. It knows no strategy and no time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from zsim.aten_call import Call
from zsim.model import ModelSpec
from zsim.regions import Region, Step, packs_its_output
from zsim.storages import Storages
from zsim.training import (
    DTYPE_NBYTES,
    Batch,
    ParameterGradient,
    Recomputed,
)

SEED = "loss:seed"


@dataclass(slots=True)
class Tape:
    """The state of one forward and backward over the whole model; `in_place`: gradients are added where nobody else holds them.

    `in_sequences`: activations have more than two dimensions, so that linears see them through views.
    """

    in_place: bool = True
    nbytes: dict[str, int] = field(default_factory=dict)
    needs_gradient: set[str] = field(default_factory=set)
    storages: Storages = field(default_factory=Storages)
    gradients: dict[str, str] = field(default_factory=dict)
    births: dict[str, int] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)
    uses: dict[str, int] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    in_sequences: bool = True
    of_linears: set[str] = field(default_factory=set)
    """Gradients that linears make of inputs with more than two dimensions: views of products of matrices."""

    def know_parameters(self, model: ModelSpec, *, dtype: str) -> None:
        """Which parameters several operators use, and the bytes of their gradients."""
        self.in_sequences = "tokens" in model.modules[0].operators[0].inputs
        used = Counter(
            fqn for module in model.modules for op in module.operators for fqn in (op.weight, op.bias) if fqn
        )
        for parameter in model.parameters:
            if used[parameter.fqn] > 1:
                self.uses[parameter.fqn], self.tied[parameter.fqn] = used[parameter.fqn], []
                self.nbytes[parameter.fqn] = parameter.numel * DTYPE_NBYTES[dtype]

    def run_forward(self, steps: list[Step], *, entry: str) -> None:
        """Values inside an operator go when it returns, its inputs after their last use; `entry`, the module's input, is its
        caller's until the module returns. A region that is checkpointed saves its inputs and nothing else."""
        last_use = {value: step for step in steps for call in step.calls for value in call.inputs}
        for step in steps:
            if step.region is not None and step.region.first is step:
                self._hold(step.region.inputs)
            for call in step.calls:
                self._make(call, saving=step.region is None, keeping=step.cached)
                self._drop(call)
            if step.cached:
                self._hold((step.calls[-1].output,))
            dropped = {value for call in step.calls for value in call.drops}
            inner = [value for call in step.calls[:-1] for value in (call.output, *call.also)]
            outer = [value for call in step.calls for value in call.inputs if last_use[value] is step]
            for value in dict.fromkeys(inner + outer):
                if value != entry and value in self.nbytes and value not in dropped:
                    self.storages.release(value)
        for step in steps:
            if step.cached and step.region is None:  # nothing of it will be recomputed: kept until the stretch is over
                self.storages.release(step.calls[-1].output)
                for name, _ in step.calls[-1].keeps:
                    self.storages.release(name)
        if entry in self.nbytes:
            self.storages.release(entry)

    def _drop(self, call: Call) -> None:
        for value in call.drops:
            self.storages.release(value)

    def _hold(self, values: tuple[str, ...]) -> None:
        for value in values:
            if value in self.nbytes:
                self.storages.hold(value)

    def _make(self, call: Call, *, saving: bool = True, keeping: bool = False) -> None:
        """One call. Not `saving`: autograd keeps nothing of it; then `keeping` says that somebody keeps what it makes besides."""
        if call.scratch:
            self.storages.allocate(f"{call.output}.scratch", call.scratch, temporary=True)
        for value in (call.output, *call.also):
            self.nbytes[value] = call.nbytes
            if call.view:
                self.storages.view(value, call.inputs[0])
            else:
                self.storages.allocate(value, call.nbytes)
        wants = bool(call.parameters) or any(value in self.needs_gradient for value in call.inputs)
        if wants:
            self.needs_gradient.update((call.output, *call.also))
            if saving:
                self._hold(call.saves)
        for name, nbytes in call.keeps:
            self.storages.allocate(name, nbytes)
        for name, _ in () if (saving and wants) or keeping else call.keeps:
            self.storages.release(name)
        if call.scratch:
            self.storages.release(f"{call.output}.scratch")

    def recompute(self, region: Region) -> None:
        """The region's forward once more, up to the last tensor that backward needs; Python then drops what it still holds.

        torch.utils.checkpoint stops there: a call that saves nothing of its own output is not even made.
        """
        entered = set(region.inputs)
        last_use = {value: step for step in region.again for call in step.calls for value in call.inputs}
        mine: dict[str, None] = {}
        for step in region.again:
            for call in step.calls:
                if call is region.last and not packs_its_output(call):
                    self._hold(call.saves)
                    break
                if step.cached:  # made in forward and kept; now it is Python's, and what autograd saves of it
                    self._hold(call.saves)
                    for name, _ in () if call.differentiable else call.keeps:
                        self.storages.release(name)
                else:
                    self._make(call)
                mine |= dict.fromkeys((call.output, *call.also))
                for value in call.drops:
                    del mine[value]
                self._drop(call)
                if call is region.last:
                    break
            else:
                inner = [value for call in step.calls[:-1] for value in (call.output, *call.also)]
                outer = [value for call in step.calls for value in call.inputs if last_use[value] is step]
                for value in dict.fromkeys(inner + outer):
                    if value not in entered and value in mine:
                        del mine[value]
                        self.storages.release(value)
                continue
            break
        for value in mine:
            self.storages.release(value)

    def cast_input(self, model: ModelSpec, *, batch: Batch, dtype: str) -> None:
        """The model's floating-point input in `dtype`; Python's references go when the first module returns, and when the root does."""
        tokens = batch.micro_batch * batch.sequence_length
        self.nbytes["x"] = tokens * model.modules[0].operators[0].in_features * DTYPE_NBYTES[dtype]
        self.storages.allocate("x", self.nbytes["x"])
        self.storages.hold("x")

    def run_backward(self, steps: list[Step]) -> None:
        """Every call in reverse; a region is recomputed when the first of its calls asks for something saved."""
        for step in reversed(steps):
            for place in reversed(range(len(step.calls))):
                call, region = step.calls[place], step.region
                if call.output not in self.needs_gradient:
                    continue
                if region is None:
                    self._differentiate(call, call)
                    continue
                again = region.renamed(call)
                if again is region.last:
                    self.recompute(region)
                    if region.kernels:
                        self.storages.events.append(Recomputed())
                over = (*region.inputs, *region.unreached) if again is region.earliest else ()
                self._differentiate(call, again, unpacked=True, over=over)

    def _differentiate(self, call: Call, saved: Call, *, unpacked: bool = False, over: tuple[str, ...] = ()) -> None:
        """Backward of `call`; `saved` names what it saved, which when `unpacked` goes before sums over broadcast dimensions.

        `over` are values that go with the node itself, as the inputs of a recomputed region do.
        """
        gradient, unwanted = self._gradient_of(call), [v for v in call.gradients if call.joint and v not in self.needs_gradient]
        scratches = [(f"{call.output}.backward_scratch{i}", nbytes) for i, nbytes in enumerate(call.backward_scratch)]
        for name, nbytes in scratches:
            self.storages.allocate(name, nbytes, temporary=True)
        parts: list[tuple[str, str]] = []
        summed = dict(call.summed)
        for name in call.gradients:
            if name not in summed:
                self._make_gradient(name, call, parts)
            elif summed[name]:
                self.storages.allocate(f"{call.output}.sum0", summed[name][0], temporary=True)
        if gradient in self.turned:  # element by element and cat: what they make of it lies as it does
            self.turned.update(part for _, part in parts)
        for name, _ in reversed(scratches):
            self.storages.release(name)
        if unpacked:
            self._release_saved(saved)
        for name, way in summed.items():
            for place in range(1, len(way)):
                self.storages.allocate(f"{call.output}.sum{place}", way[place], temporary=True)
                self.storages.release(f"{call.output}.sum{place - 1}")
            self._make_gradient(name, call, parts)
            if way:
                self.storages.release(f"{call.output}.sum{len(way) - 1}")
        for name in call.passes:
            if name in self.needs_gradient:
                self.storages.hold(gradient)
                parts.append((name, gradient))
                if name in call.turns:
                    self.turned.add(gradient)
        self.storages.release(gradient)
        for other in call.also:
            self.storages.release(self.gradients.pop(other))
        for name in unwanted:
            self.storages.release(f"{name}.grad{self.births[name]}")
        if not unpacked:
            self._release_saved(saved)
        for value in over:
            if value in self.nbytes:
                self.storages.release(value)
        for name, part in parts:
            self._accumulate(name, part)
        self._sum_tied(call.parameters)

    def _gradient_of(self, call: Call) -> str:
        """The gradient of what `call` made, copied for a linear that could not multiply with it as it lies."""
        gradient = self.gradients.pop(call.output)
        if call.operator != "linear" or gradient not in self.turned:
            return gradient
        copy = self._new_gradient(call.output)
        self.storages.release(gradient)
        return copy

    def _make_gradient(self, name: str, call: Call, parts: list[tuple[str, str]]) -> None:
        if name in call.parameters:
            if name in self.tied:
                self.tied[name].append(self._new_gradient(name))
            else:
                self.storages.events.append(ParameterGradient(name))
        elif call.joint and name not in self.needs_gradient:
            self._new_gradient(name)
        elif name in self.needs_gradient:
            parts.append((name, self._new_gradient(name)))
            if self.in_sequences and call.operator == "linear":
                self.of_linears.add(parts[-1][1])

    def _sum_tied(self, parameters: tuple[str, ...]) -> None:
        """Gradients of a parameter with several uses are added apart: that of a linear is a view, in which nothing is added."""
        for name in parameters:
            parts = self.tied.get(name, [])
            if parts and len(parts) == self.uses[name]:
                self.storages.events.append(ParameterGradient(name))
                for part in parts:
                    self.storages.release(part)
                parts.clear()

    def _release_saved(self, call: Call) -> None:
        for name in call.saves:
            if name in self.nbytes:
                self.storages.release(name)
        for name, _ in call.keeps:
            self.storages.release(name)

    def _new_gradient(self, value: str) -> str:
        self.births[value] = self.births.get(value, 0) + 1
        name = f"{value}.grad{self.births[value]}"
        self.storages.allocate(name, self.nbytes[value], temporary=True)
        return name

    def _accumulate(self, value: str, part: str) -> None:
        """The engine's input buffer: a second gradient is added in place into the first, if nobody else holds that and it is no view.

        Not on the CPU, where a dispatch-level meter watches: autograd adds out of place under any dispatch mode.
        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        if value not in self.gradients:
            self.gradients[value] = part
            return
        first = self.gradients[value]
        if self.in_place and first not in self.of_linears and self.storages.references[first] == 1:
            self.storages.release(part)
        else:
            self.gradients[value] = self._new_gradient(value)
            if first in self.turned:
                self.turned.add(self.gradients[value])
            self.storages.release(first)
            self.storages.release(part)
