"""What eager autograd keeps, when it lets go, and in which order: memory events of each module's
forward and backward.

A liveness simulation over the calls of `zsim.autograd.aten.calls`, by counting references to
storages as torch does: Python holds a value until its last use (a module's input until the module
has returned), autograd holds what it saved until the node has run backward, and the engine holds
gradients (`zsim.autograd.gradients`). It knows no strategy and no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, replace

from zsim.autograd.aten.call import Call
from zsim.autograd.gradients import Gradients, Part
from zsim.autograd.lowered import InnerCall, NodeOver, ParameterGradient, Recomputed, storage_events
from zsim.autograd.recompute import Region, Step, packs_its_output
from zsim.autograd.storages import Storages
from zsim.ir.ops import Free, MemoryEvent
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NBYTES, Batch

SEED = "loss:seed"


def summed(loss: str, forwards: int) -> str:
    """The buffer of the sum of the losses of so many forwards, the last of which is `loss`."""
    return loss if forwards == 1 else f"loss:sum{forwards}"


@dataclass(slots=True)
class Tape:
    """The state of one forward and backward over the whole model; `in_place`: gradients are added
    where nobody else holds them."""

    in_place: InitVar[bool] = True
    nbytes: dict[str, int] = field(default_factory=dict)
    needs_gradient: set[str] = field(default_factory=set)
    storages: Storages = field(default_factory=Storages)
    gradients: Gradients = field(init=False)
    framed: frozenset[str] = frozenset()
    """Values of the module that runs that go by a drop of some operator alone, not after their last
    use."""

    def __post_init__(self, in_place: bool) -> None:
        self.gradients = Gradients(storages=self.storages, nbytes=self.nbytes, in_place=in_place)

    def know_parameters(self, model: ModelSpec, *, dtype: str, casts_once: bool = False) -> None:
        """Which parameters several operators use, and the bytes of their gradients.

        `casts_once`: all linears with the same weight read one copy of it, whose cast gives the
        parameter one gradient.
        """
        self.gradients.in_sequences = "tokens" in model.first_operator.inputs
        operators = [op for module in model.modules for op in module.operators]
        through_casts = {
            fqn
            for op in operators
            if casts_once and op.kind == "linear"
            for fqn in (op.weight, op.bias)
        }
        directly = [op for op in operators if not (casts_once and op.kind == "linear")]
        used = Counter(
            [
                *(fqn for op in directly for fqn in (op.weight, op.bias) if fqn),
                *filter(None, through_casts),
            ]
        )
        for parameter in model.parameters:
            if used[parameter.fqn] > 1:
                self.gradients.tie(
                    parameter.fqn, uses=used[parameter.fqn],
                    nbytes=parameter.numel * DTYPE_NBYTES[dtype],
                )

    def run_forward(
        self, steps: list[Step], *, entry: str, later: frozenset[str] = frozenset(),
        over: Iterable[Step] = (),
    ) -> None:
        """Values inside an operator go when it returns, its inputs after their last use; `entry`,
        the module's input, is its caller's until the module returns. What is read `later`, by other
        parts of the block, stays. A region that is checkpointed saves its inputs and nothing else.
        The whole module's steps, where they are `over` with these, let go of what only they keep.
        """
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
            inner = [
                value
                for call in step.calls[:-1]
                if not call.cached
                for value in (call.output, *call.also)
            ]
            inner += step.calls[-1].also
            inner = [value for value in inner if last_use.get(value, step) is step]
            outer = [
                value for call in step.calls for value in call.inputs if last_use[value] is step
            ]
            for value in dict.fromkeys(inner + outer):
                if (
                    value != entry
                    and value in self.nbytes
                    and value not in dropped
                    and value not in later
                    and value not in self.framed
                ):
                    self.storages.release(value)
        for step in over:
            # nothing of it will be recomputed: kept until the stretch is over
            if step.cached and step.region is None:
                self.storages.release(step.kept.output)
                for name, _ in step.kept.keeps:
                    self.storages.release(name)
        if entry in self.nbytes and entry not in later and entry not in self.framed:
            self.storages.release(entry)

    def let_go(self, steps: list[Step]) -> tuple[Free, ...]:
        """Autocast ends and empties its cache: what of the copies made in `steps` nobody else
        holds."""
        for call in [
            call for step in steps for call in step.calls if call.cached and not call.found
        ]:
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
        """One call. Not `saving`: autograd keeps nothing of it; then `keeping` says that somebody
        keeps what it makes besides."""
        if call.scratch:
            self.storages.allocate(f"{call.output}.scratch", call.scratch, temporary=True)
        for value in (call.output, *call.also):
            self.nbytes[value] = call.nbytes
            if call.view:
                self.storages.view(value, call.inputs[0])
            else:
                self.storages.allocate(value, call.nbytes)
        wants = bool(call.parameters or call.weights) or any(
            value in self.needs_gradient for value in call.inputs
        )
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
        """The region's forward once more, up to the last tensor that backward needs; Python then
        drops what it still holds.

        torch.utils.checkpoint stops there, unless told not to: a call that saves nothing of its own
        output is not even made. What a unit in the block was called with is the block's until that
        returns; both have a mark.
        """
        framed = {
            value for step in region.again for call in step.calls for value in call.drops
        }.union(region.inputs)
        last_use = {
            value: step for step in region.again for call in step.calls for value in call.inputs
        }
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
                # made in forward and kept; now it is Python's, and what autograd saves of it
                if step.keeps(call):
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
                inner = [
                    value
                    for call in step.calls[:-1]
                    if not call.cached
                    for value in (call.output, *call.also)
                ]
                inner += step.calls[-1].also
                inner = [value for value in inner if last_use.get(value, step) is step]
                outer = [
                    value
                    for call in step.calls
                    for value in call.inputs
                    if last_use[value] is step and value != step.entry
                ]
                drop_each([*inner, *outer])
                continue
            break
        else:
            if region.again[-1].inside:
                self.storages.events.append(
                    InnerCall(region.again[-1].inside, returns=True, kernels=kernels)
                )
        for value in mine:
            self.storages.release(value)

    def cast_input(self, model: ModelSpec, name: str, *, batch: Batch, dtype: str) -> None:
        """The model's floating-point input in `dtype`; Python's references go when the first module
        returns, and when the root does."""
        tokens = batch.micro_batch * batch.sequence_length
        self.nbytes[name] = tokens * model.first_operator.in_features * DTYPE_NBYTES[dtype]
        self.storages.allocate(name, self.nbytes[name])
        self.storages.hold(name)

    def end_forward(self, entry: str) -> None:
        """The root returns, and lets go of `entry`, the model's input, if that was cast."""
        if entry in self.nbytes:
            self.storages.release(entry)

    def sum_losses(self, losses: list[str]) -> tuple[MemoryEvent, ...]:
        """Add the last of `losses` to the sum of those before it; nothing for the first. Returns
        these events apart."""
        if len(losses) > 1:
            self.storages.allocate(summed(losses[-1], len(losses)), self.nbytes[losses[-1]])
            self.storages.release(losses[-1])
            self.storages.release(summed(losses[-2], len(losses) - 1))
        return tuple(storage_events(self.storages.take()))

    def seed(self, losses: list[str]) -> None:
        """The gradient that backward begins with: the caller's until it returns, and that of every
        loss in the sum."""
        self.storages.allocate(SEED, self.nbytes[losses[-1]], temporary=True)
        for loss in losses:
            self.storages.hold(SEED)
            self.gradients.waiting[loss] = SEED

    def run_backward(self, steps: list[Step], *, bound: str = "") -> list[Region]:
        """Every call in reverse; a region is recomputed when the first of its calls asks for
        something saved. Returns those that were.

        The gradient of `bound`, which a unit in a block was called with, waits for it to pass on.
        """
        recomputed, self.gradients.bound = list[Region](), bound
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
                    self.gradients.flatten(call)
                    self.recompute(region)
                    recomputed.append(region)
                    if region.kernels:
                        self.storages.events.append(Recomputed())
                over = (*region.inputs, *region.unreached) if again is region.earliest else ()
                self._differentiate(call, again, unpacked=True, over=over)
        return recomputed

    def _differentiate(
        self, call: Call, saved: Call, *, unpacked: bool = False, over: tuple[str, ...] = ()
    ) -> None:
        """Backward of `call`; `saved` names what it saved, which when `unpacked` goes before sums
        over broadcast dimensions.

        `over` are values that go with the node itself, as the inputs of a recomputed region do.
        """
        self.gradients.flatten(call)
        start = len(self.storages.events)
        gradient = self.gradients.waiting.pop(call.output)
        scratches = [
            (f"{call.output}.backward_scratch{i}", nbytes)
            for i, nbytes in enumerate(call.backward_scratch)
        ]
        for name, nbytes in scratches:
            self.storages.allocate(name, nbytes, temporary=True)
        if call.sum_first and not self.needs_gradient.intersection(call.passes):
            self.storages.release(gradient)
            gradient = ""
        parts: list[Part] = []
        summed = dict(call.summed)
        for name in call.gradients:
            if name not in summed:
                self._make_gradient(name, call, parts)
            elif summed[name]:
                self.storages.allocate(f"{call.output}.sum0", summed[name][0], temporary=True)
        # element by element and cat: what they make of it lies as it does
        if gradient in self.gradients.turned:
            self.gradients.turned.update(part for _, part in parts)
        for name, _ in reversed(scratches):
            self.storages.release(name)
        if unpacked:
            if (
                summed
                and self.storages.events
                and isinstance(self.storages.events[-1], ParameterGradient)
            ):
                self.storages.events[-1] = replace(self.storages.events[-1], node_makes_more=True)
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
                    self.gradients.turned.add(gradient)
        if gradient:
            self.storages.release(gradient)
        for other in call.also:
            self.storages.release(self.gradients.waiting.pop(other))
        for name, part in parts:
            if name not in self.needs_gradient:
                self.storages.release(part)
        if not unpacked:
            self._release_saved(saved)
        for value in over:
            if value in self.nbytes:
                self.storages.release(value)
        of_node = self.storages.events[start:]
        made = [
            place for place, event in enumerate(of_node) if isinstance(event, ParameterGradient)
        ]
        if made and not any(isinstance(event, Free) for event in of_node[made[-1] :]):
            self.storages.events.append(NodeOver())
        self.gradients.add_up(call, [part for part in parts if part[0] in self.needs_gradient])

    def _make_gradient(self, name: str, call: Call, parts: list[Part]) -> None:
        if name in call.parameters:
            self.gradients.of_parameter(name, call)
        elif call.joint or name in self.needs_gradient:
            parts.append(self.gradients.of_input(name, call))

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
