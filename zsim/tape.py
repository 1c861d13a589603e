"""What eager autograd keeps, when it lets go, and in which order: memory events of each module's forward and backward.

A liveness simulation over the calls of `zsim.eager`, by counting references to storages as torch does: Python holds a value until its
last use (a module's input until the module has returned), autograd holds what it saved until the node has run
backward, and the engine holds gradients. It knows no strategy and no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from zsim.aten_call import Call
from zsim.model import ModelSpec
from zsim.ops import Free, MemoryEvent
from zsim.regions import Region, Step, packs_its_output
from zsim.storages import Storages
from zsim.training import (
    DTYPE_NBYTES,
    SUM_OF_GRADIENTS,
    Batch,
    InnerCall,
    NodeOver,
    ParameterGradient,
    Recomputed,
    storage_events,
)

SEED = "loss:seed"


def summed(loss: str, forwards: int) -> str:
    """The buffer of the sum of the losses of so many forwards, the last of which is `loss`."""
    return loss if forwards == 1 else f"loss:sum{forwards}"


def _at_unit(value: str) -> str:
    """The gradient of `value` at the node of the unit that was called with it."""
    return f"{value} at its unit"


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
    made: Counter[str] = field(default_factory=Counter)
    added: list[str] = field(default_factory=list)
    """What the node that runs has made and the engine has added to something else: it lives until the node is over."""
    framed: frozenset[str] = frozenset()
    """Values of the module that runs that go by a drop of some operator alone, not after their last use."""
    in_sequences: bool = True
    bound: str = ""
    """What the unit in a block, whose backward runs, was called with: the gradient of that waits at the unit's own node of autograd."""
    of_linears: set[str] = field(default_factory=set)
    """Gradients that linears make of inputs with more than two dimensions: views of products of matrices."""

    def know_parameters(self, model: ModelSpec, *, dtype: str, casts_once: bool = False) -> None:
        """Which parameters several operators use, and the bytes of their gradients.

        `casts_once`: all linears with the same weight read one copy of it, whose cast gives the parameter one gradient.
        """
        self.in_sequences = "tokens" in model.first_operator.inputs
        operators = [op for module in model.modules for op in module.operators]
        through_casts = {fqn for op in operators if casts_once and op.kind == "linear" for fqn in (op.weight, op.bias)}
        directly = [op for op in operators if not (casts_once and op.kind == "linear")]
        used = Counter([*(fqn for op in directly for fqn in (op.weight, op.bias) if fqn), *filter(None, through_casts)])
        for parameter in model.parameters:
            if used[parameter.fqn] > 1:
                self.uses[parameter.fqn], self.tied[parameter.fqn] = used[parameter.fqn], []
                self.nbytes[parameter.fqn] = parameter.numel * DTYPE_NBYTES[dtype]

    def run_forward(self, steps: list[Step], *, entry: str, later: frozenset[str] = frozenset(), over: Iterable[Step] = ()) -> None:
        """Values inside an operator go when it returns, its inputs after their last use; `entry`, the module's input, is its
        caller's until the module returns. What is read `later`, by other parts of the block, stays. A region that is checkpointed
        saves its inputs and nothing else. The whole module's steps, where they are `over` with these, let go of what only they keep."""
        last_use = {value: step for step in steps for call in step.calls for value in call.inputs}
        for step in steps:
            if step.region is not None and step.region.first is step:
                self._hold(step.region.inputs)
            for call in step.calls:
                if call.found:
                    continue
                self._make(call, saving=step.region is None, keeping=step.cached)
                self._drop(call)
            if step.cached:
                self._hold((step.kept.output,))
            dropped = {value for call in step.calls for value in call.drops}
            inner = [value for call in step.calls[:-1] if not call.cached for value in (call.output, *call.also)]
            inner += step.calls[-1].also
            inner = [value for value in inner if last_use.get(value, step) is step]
            outer = [value for call in step.calls for value in call.inputs if last_use[value] is step]
            for value in dict.fromkeys(inner + outer):
                if value != entry and value in self.nbytes and value not in dropped and value not in later and value not in self.framed:
                    self.storages.release(value)
        for step in over:
            if step.cached and step.region is None:  # nothing of it will be recomputed: kept until the stretch is over
                self.storages.release(step.kept.output)
                for name, _ in step.kept.keeps:
                    self.storages.release(name)
        if entry in self.nbytes and entry not in later and entry not in self.framed:
            self.storages.release(entry)

    def let_go(self, steps: list[Step]) -> tuple[Free, ...]:
        """Autocast ends and empties its cache: what of the copies made in `steps` nobody else holds."""
        for call in [call for step in steps for call in step.calls if call.cached and not call.found]:
            self.storages.release(call.output)
        return tuple(event for event in self.storages.take() if isinstance(event, Free))

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
        wants = bool(call.parameters or call.weights) or any(value in self.needs_gradient for value in call.inputs)
        if wants:
            self.needs_gradient.update((call.output, *call.also))
            if saving:
                self._hold(self._saved(call))
        for name, nbytes in call.keeps:
            self.storages.allocate(name, nbytes)
        for name, _ in () if (saving and wants) or keeping else call.keeps:
            self.storages.release(name)
        if call.scratch:
            self.storages.release(f"{call.output}.scratch")

    def _saved(self, call: Call) -> tuple[str, ...]:
        """What autograd saves of a call: a weight's copy only for the gradient of an input."""
        if not call.weights or self.needs_gradient.intersection(call.inputs):
            return call.saves
        return tuple(value for value in call.saves if value not in call.weights)

    def recompute(self, region: Region) -> None:
        """The region's forward once more, up to the last tensor that backward needs; Python then drops what it still holds.

        torch.utils.checkpoint stops there, unless told not to: a call that saves nothing of its own output is not even made. What a
        unit in the block was called with is the block's until that returns; both have a mark.
        """
        framed = {value for step in region.again for call in step.calls for value in call.drops}.union(region.inputs)
        last_use = {value: step for step in region.again for call in step.calls for value in call.inputs}
        mine: dict[str, None] = {}

        def drop_each(values: Iterable[str]) -> None:
            for value in dict.fromkeys(values):
                if value in mine and value not in framed:
                    del mine[value]
                    self.storages.release(value)

        kernels = 0
        for step, before in zip(region.again, [Step([]), *region.again], strict=False):
            if before.inside not in ("", step.inside):
                self.storages.events.append(InnerCall(before.inside, returns=True, kernels=kernels))
                drop_each([before.entry] if last_use[before.entry].inside == before.inside else [])
            if step.inside not in ("", before.inside):
                self.storages.events.append(InnerCall(step.inside, returns=False, kernels=kernels))
            for call in step.calls:
                if region.stops_early and call is region.last and not packs_its_output(call):
                    self._hold(self._saved(call))
                    break
                if step.keeps(call):  # made in forward and kept; now it is Python's, and what autograd saves of it
                    self._hold(self._saved(call))
                    for name, _ in () if call.differentiable else call.keeps:
                        self.storages.release(name)
                else:
                    self._make(call)
                    kernels += bool(call.moved)
                mine |= dict.fromkeys((call.output, *call.also))
                for value in call.drops:
                    del mine[value]
                self._drop(call)
                if region.stops_early and call is region.last:
                    break
            else:
                inner = [value for call in step.calls[:-1] if not call.cached for value in (call.output, *call.also)]
                inner += step.calls[-1].also
                inner = [value for value in inner if last_use.get(value, step) is step]
                outer = [value for call in step.calls for value in call.inputs if last_use[value] is step and value != step.entry]
                drop_each([*inner, *outer])
                continue
            break
        else:
            if region.again[-1].inside:
                self.storages.events.append(InnerCall(region.again[-1].inside, returns=True, kernels=kernels))
        for value in mine:
            self.storages.release(value)

    def cast_input(self, model: ModelSpec, name: str, *, batch: Batch, dtype: str) -> None:
        """The model's floating-point input in `dtype`; Python's references go when the first module returns, and when the root does."""
        tokens = batch.micro_batch * batch.sequence_length
        self.nbytes[name] = tokens * model.first_operator.in_features * DTYPE_NBYTES[dtype]
        self.storages.allocate(name, self.nbytes[name])
        self.storages.hold(name)

    def end_forward(self, entry: str) -> None:
        """The root returns, and lets go of `entry`, the model's input, if that was cast."""
        if entry in self.nbytes:
            self.storages.release(entry)

    def sum_losses(self, losses: list[str]) -> tuple[MemoryEvent, ...]:
        """Add the last of `losses` to the sum of those before it; nothing for the first. Returns these events apart."""
        if len(losses) > 1:
            self.storages.allocate(summed(losses[-1], len(losses)), self.nbytes[losses[-1]])
            self.storages.release(losses[-1])
            self.storages.release(summed(losses[-2], len(losses) - 1))
        return tuple(storage_events(self.storages.take()))

    def seed(self, losses: list[str]) -> None:
        """The gradient that backward begins with: the caller's until it returns, and that of every loss in the sum."""
        self.storages.allocate(SEED, self.nbytes[losses[-1]], temporary=True)
        for loss in losses:
            self.storages.hold(SEED)
            self.gradients[loss] = SEED

    def run_backward(self, steps: list[Step], *, bound: str = "") -> list[Region]:
        """Every call in reverse; a region is recomputed when the first of its calls asks for something saved. Returns those that were.

        The gradient of `bound`, which a unit in a block was called with, waits for `pass_on`.
        """
        recomputed, self.bound = list[Region](), bound
        for step in reversed(steps):
            for place in reversed(range(len(step.calls))):
                call, region = step.calls[place], step.region
                if call.found or call.output not in self.needs_gradient:
                    continue
                if region is None:
                    self._differentiate(call, call)
                    continue
                again = region.renamed(call)
                if again is region.last:
                    self._flatten_gradient(call)
                    self.recompute(region)
                    recomputed.append(region)
                    if region.kernels:
                        self.storages.events.append(Recomputed())
                over = (*region.inputs, *region.unreached) if again is region.earliest else ()
                self._differentiate(call, again, unpacked=True, over=over)
        return recomputed

    def pass_on(self) -> None:
        """The node that fully_shard puts before a unit in a block has run its hook: the gradient goes on to what the block makes of it."""
        value, self.bound = self.bound, ""
        waiting = self.gradients.pop(_at_unit(value), "")
        if waiting:
            self._accumulate([(value, waiting)])

    def _differentiate(self, call: Call, saved: Call, *, unpacked: bool = False, over: tuple[str, ...] = ()) -> None:
        """Backward of `call`; `saved` names what it saved, which when `unpacked` goes before sums over broadcast dimensions.

        `over` are values that go with the node itself, as the inputs of a recomputed region do.
        """
        self._flatten_gradient(call)
        start = len(self.storages.events)
        gradient = self.gradients.pop(call.output)
        unwanted = [value for value in call.gradients if call.joint and value not in self.needs_gradient]
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
            if summed and self.storages.events and isinstance(self.storages.events[-1], ParameterGradient):
                self.storages.events[-1] = replace(self.storages.events[-1], goes_on=True)
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
        of_node = self.storages.events[start:]
        made = [place for place, event in enumerate(of_node) if isinstance(event, ParameterGradient)]
        if made and not any(isinstance(event, Free) for event in of_node[made[-1] :]):
            self.storages.events.append(NodeOver())
        self._add_up(call, parts)

    def _add_up(self, call: Call, parts: list[tuple[str, str]]) -> None:
        """The engine adds what `call` made to what is there, in the order in which autograd's nodes end.

        A linear's weight goes through one more node, which transposes it. In sequences its input goes through another, before
        that one where there is no bias and after it where there is.
        """
        if call.operator == "linear":
            biases = dict(call.summed)
            self._sum_tied([name for name in call.parameters if name in biases])
            self._accumulate([part for part in parts if part[0] in biases])
            of_input = [part for part in parts if part[0] not in call.weights]
            if not (call.addmm and self.in_sequences):
                self._accumulate(of_input)
            self._sum_tied([name for name in call.parameters if name not in biases])
            self._accumulate([part for part in parts if part[0] in call.weights and part[0] not in biases])
            if call.addmm and self.in_sequences:
                self._accumulate(of_input)
        else:
            for name, part in parts:
                self._accumulate_one(name, part)
            self._sum_tied(list(call.parameters), viewed=False)

    def _flatten_gradient(self, call: Call) -> None:
        """The gradient of what `call` made is copied for a linear that could not multiply with it as it lies, by the node before it."""
        gradient = self.gradients[call.output]
        if call.operator == "linear" and gradient in self.turned:
            self.gradients[call.output] = self._new_gradient(call.output)
            self.storages.release(gradient)

    def _make_gradient(self, name: str, call: Call, parts: list[tuple[str, str]]) -> None:
        if name in call.parameters:
            if name in self.tied:
                self.tied[name].append(self._new_gradient(name))
                if call.operator == "linear":
                    self.of_linears.add(self.tied[name][-1])
            else:
                self.storages.events.append(ParameterGradient(name))
        elif call.joint and name not in self.needs_gradient:
            self._new_gradient(name)
        elif name in self.needs_gradient:
            parts.append((name, self._new_gradient(name)))
            if call.operator == "linear" and (self.in_sequences or name in call.weights):
                self.of_linears.add(parts[-1][1])

    def _sum_tied(self, names: list[str], *, viewed: bool = True) -> None:
        """As `_sum_one`, for all parameters whose gradients one node has made; for a linear they are views of what it made."""
        start = len(self.storages.events)
        for name in names:
            self._sum_one(name, viewed=viewed)
        made = [event for event in self.storages.events[start:] if isinstance(event, ParameterGradient)]
        for event in made[:-1]:
            self.storages.events[self.storages.events.index(event, start)] = replace(event, goes_on=True)
        self._end_node()

    def _sum_one(self, name: str, *, viewed: bool) -> None:
        """The next gradient of a parameter with several uses is added to the sum of those before; the last makes the parameter's.

        In place as `_accumulate_one` does, but not into a `viewed` gradient: that of a linear is a view of what was made.
        """
        parts = self.tied.get(name, [])
        if not parts:
            return
        self.made[name] += 1
        last = self.made[name] == self.uses[name]
        if len(parts) == 1:
            if viewed:
                self.of_linears.add(parts[0])
            return
        older, newer = parts
        parts.clear()
        in_place = self.in_place and older not in self.of_linears
        if in_place and not last:
            parts.append(older)
        else:
            if in_place:
                self.storages.release(older)
            if last:
                self.storages.events.append(ParameterGradient(name))
            else:
                parts.append(self._new_gradient(name))
            if not in_place:
                self.storages.release(older)
        self.added.append(newer)

    def _end_node(self) -> None:
        """A node of autograd is over: what it made and the engine added to something else goes."""
        for name in self.added:
            self.storages.release(name)
        self.added.clear()

    def _release_saved(self, call: Call) -> None:
        """What was read goes first, then what was made, the output last."""
        saved = [name for name in self._saved(call) if name in self.nbytes]
        for name in saved:
            if name != call.output:
                self.storages.release(name)
        for name, _ in call.keeps:
            self.storages.release(name)
        if call.output in saved:
            self.storages.release(call.output)

    def _new_gradient(self, value: str, *, called: str = ".grad") -> str:
        self.births[value] = self.births.get(value, 0) + 1
        name = f"{value}{called}{self.births[value]}"
        self.storages.allocate(name, self.nbytes[value], temporary=True)
        return name

    def _accumulate(self, parts: list[tuple[str, str]]) -> None:
        for name, part in parts:
            self._accumulate_one(name, part)
        self._end_node()

    def _accumulate_one(self, value: str, part: str) -> None:
        """The engine's input buffer: a second gradient is added in place into the first, if nobody else holds that and it is no view.

        Not on the CPU, where a dispatch-level meter watches: autograd adds out of place under any dispatch mode.
        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        place = _at_unit(value) if value == self.bound else value
        if place not in self.gradients:
            self.gradients[place] = part
            return
        first = self.gradients[place]
        if self.in_place and first not in self.of_linears and self.storages.references[first] == 1:
            self.added.append(part)
        else:
            self.gradients[place] = self._new_gradient(value, called=SUM_OF_GRADIENTS)
            if first in self.turned:
                self.turned.add(self.gradients[place])
            self.storages.release(first)
            self.added.append(part)
