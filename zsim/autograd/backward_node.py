"""One node of autograd's graph: the memory events of the backward of one call, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zsim.autograd.aten.call import Call
from zsim.autograd.gradients import GradientPart
from zsim.autograd.lowered import NodeOver, ParameterGradient
from zsim.autograd.values import Values
from zsim.ir.buffers import form_of
from zsim.ir.ops import Free


def differentiate(
    values: Values, call: Call, saved: Call, *, unpacked: bool = False, over: tuple[str, ...] = ()
) -> None:
    """Run the backward of `call` on `values`.

    The call `saved` has the names of the saved values. If a checkpoint `unpacked` them, they go
    before the sums over broadcast dimensions. Values in `over` go with the node itself, as the
    inputs of a recomputed region do.
    """
    values.gradients.flatten(call)
    start = len(values.storages.events)
    node = _Node(values, call, gradient=values.gradients.waiting.pop(call.output))
    node.make_gradients(in_place=saved.saves[0] if call.in_place else "")
    if unpacked:
        node.mark_that_more_follow()
        values.release_saved(saved)
    node.sum_over_broadcast()
    node.pass_on()
    node.release_gradients()
    if not unpacked:
        values.release_saved(saved)
    for value in over:
        if value in values.nbytes:
            values.storages.release(value)
    node.mark_end(start)
    values.gradients.add_up(call, [part for part in node.parts if values.wants(part[0])])


@dataclass(slots=True)
class _Node:
    """`gradient` of the call's output, "" once it is gone; `parts` are gradients of its inputs."""

    values: Values
    call: Call
    gradient: str
    parts: list[GradientPart] = field(default_factory=list)

    def make_gradients(self, *, in_place: str = "") -> None:
        """The formula runs: its scratch, its gradients, made `in_place` of a saved value where it
        names one, and what is to be summed."""
        storages, call = self.values.storages, self.call
        scratch = [
            form_of(call.output, "backward_scratch", i) for i in range(len(call.backward_scratch))
        ]
        for buffer, nbytes in zip(scratch, call.backward_scratch, strict=True):
            storages.allocate(buffer, nbytes, temporary=True)
        if call.sum_first and not self.values.needs_gradient.intersection(call.passes):
            storages.release(self.gradient)
            self.gradient = ""
        summed = dict(call.summed)
        for name in call.gradients:
            if call.one_node:
                self._make_product(name)
            elif name not in summed:
                self._make_gradient(name, in_place=in_place)
            elif summed[name]:
                storages.allocate(form_of(call.output, "sum", 0), summed[name][0], temporary=True)
        # element by element and cat: what they make of it has its strides
        if self.gradient in self.values.gradients.turned and not call.one_node:
            self.values.gradients.turned.update(part for _, part in self.parts)
        for name in reversed(scratch):
            storages.release(name)

    def _make_product(self, name: str) -> None:
        """A gradient by a linear's own node, which multiplies with a copy of what is turned."""
        storages, call, is_bias = self.values.storages, self.call, name == self.call.bias
        copy = form_of(call.output, "turned")
        copies = self.gradient in self.values.gradients.turned and not is_bias
        if copies:
            storages.allocate(copy, call.nbytes, temporary=True)
        self._make_gradient(name)
        if name in call.parameters and not is_bias and call.bias in call.parameters:
            self.mark_that_more_follow(has_more=True)
        if copies:
            storages.release(copy)

    def _make_gradient(self, name: str, *, in_place: str = "") -> None:
        if in_place:
            self.values.storages.hold(in_place)
            self.parts.append((name, in_place))
        elif name in self.call.parameters:
            self.values.gradients.of_parameter(name, self.call)
        elif self.call.joint or self.values.wants(name):
            self.parts.append(self.values.gradients.of_input(name, self.call))

    def mark_that_more_follow(self, *, has_more: bool = False) -> None:
        """The sums make another gradient after the last one, or something else that `has_more`."""
        events = self.values.storages.events
        if (has_more or self.call.summed) and events and isinstance(events[-1], ParameterGradient):
            events[-1] = replace(events[-1], node_makes_more=True)

    def sum_over_broadcast(self) -> None:
        """Sums over broadcast dimensions, each step of which allocates its result."""
        storages, output = self.values.storages, self.call.output
        for name, sizes in dict(self.call.summed).items():
            for number, nbytes in enumerate(sizes[1:], start=1):
                storages.allocate(form_of(output, "sum", number), nbytes, temporary=True)
                storages.release(form_of(output, "sum", number - 1))
            self._make_gradient(name)
            if sizes:
                storages.release(form_of(output, "sum", len(sizes) - 1))

    def pass_on(self) -> None:
        """Inputs whose gradient is that of the output itself."""
        for name in self.call.passes:
            if self.values.wants(name):
                self.values.storages.hold(self.gradient)
                self.parts.append((name, self.gradient))
                if name in self.call.turns:
                    self.values.gradients.turned.add(self.gradient)

    def release_gradients(self) -> None:
        """The node is done with its outputs' gradients, and with those that no input wants."""
        release = self.values.storages.release
        if self.gradient:
            release(self.gradient)
        for other in self.call.also:
            release(self.values.gradients.waiting.pop(other))
        for name, part in self.parts:
            if not self.values.wants(name):
                release(part)

    def mark_end(self, start: int) -> None:
        """A mark where nothing is freed after the node's last gradient of a parameter."""
        events = self.values.storages.events
        for event in reversed(events[start:]):
            if isinstance(event, Free):
                return
            if isinstance(event, ParameterGradient):
                events.append(NodeOver())
                return
