"""The autograd engine's gradients: it holds them until their node runs, and adds up those of one
value or parameter.

Source: torch/csrc/autograd/input_buffer.cpp. `zsim.autograd.backward_node` makes the gradients.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from zsim.autograd.aten.call import Call
from zsim.autograd.lowered import ParameterGradient
from zsim.autograd.storages import Storages
from zsim.ir.buffers import form_of

GradientPart = tuple[str, str]
"""A value and a gradient of it."""


def _at_unit(value: str) -> str:
    """The gradient of `value` at the node of the unit that was called with it."""
    return f"{value} at its unit"


@dataclass(slots=True, kw_only=True)
class Gradients:
    """The gradients of one backward. `in_place`: the engine may add one into another.

    `in_sequences`: activations have more than two dimensions, so that linears see them through
    views. `nbytes`: of each value, and of each parameter with several uses.
    """

    storages: Storages
    nbytes: dict[str, int]
    in_place: bool
    in_sequences: bool = True
    waiting: dict[str, str] = field(default_factory=dict)
    """The gradient of each value whose node has not run."""
    bound: str = ""
    """The input of the nested unit whose backward runs; its gradient waits at the unit's node."""
    uses: dict[str, int] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    births: dict[str, int] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)
    """Gradients whose strides a linear cannot multiply with."""
    of_linears: set[str] = field(default_factory=set)
    """Gradients that linears make of inputs with more than two dimensions: views of products."""
    made: Counter[str] = field(default_factory=Counter)
    added: list[str] = field(default_factory=list)
    """Gradients of the running node that the engine has added to others; they live until the node
    ends."""

    def tie(self, parameter: str, *, uses: int, nbytes: int) -> None:
        """`parameter` has several `uses`, and a gradient of `nbytes`."""
        self.uses[parameter], self.tied[parameter], self.nbytes[parameter] = uses, [], nbytes

    def of_parameter(self, name: str, call: Call) -> None:
        """`call` makes a gradient of a parameter: its own, or one of several that are added up."""
        if name not in self.tied:
            self.storages.events.append(ParameterGradient(name))
            return
        self.tied[name].append(self.new(name))
        if call.operator == "linear":
            self.of_linears.add(self.tied[name][-1])

    def of_input(self, name: str, call: Call) -> GradientPart:
        """`call` makes a gradient of what it read."""
        gradient = self.new(name)
        if call.operator == "linear" and (self.in_sequences or name in call.weights):
            self.of_linears.add(gradient)
        return name, gradient

    def new(self, value: str, form: Literal["grad", "summed"] = "grad") -> str:
        """One more gradient of `value`, or a sum of some."""
        self.births[value] = self.births.get(value, 0) + 1
        name = form_of(value, form, self.births[value])
        self.storages.allocate(name, self.nbytes[value], temporary=True)
        return name

    def flatten(self, call: Call) -> None:
        """The gradient of what `call` made is copied for a linear that could not multiply with it
        as it lies, by the node before it."""
        gradient = self.waiting[call.output]
        if call.operator == "linear" and gradient in self.turned:
            self.waiting[call.output] = self.new(call.output)
            self.storages.release(gradient)

    def add_up(self, call: Call, parts: list[GradientPart]) -> None:
        """The engine adds what `call` made to what is there, in the order in which autograd's nodes
        end.

        A linear's weight goes through one more node, which transposes it. In sequences its input
        goes through another: before that node without a bias, after it with one.
        """
        if call.operator == "linear":
            biases = dict(call.summed)
            self._sum_tied([name for name in call.parameters if name in biases])
            self._accumulate([part for part in parts if part[0] in biases])
            of_input = [part for part in parts if part[0] not in call.weights]
            if not (call.addmm and self.in_sequences):
                self._accumulate(of_input)
            self._sum_tied([name for name in call.parameters if name not in biases])
            self._accumulate(
                [part for part in parts if part[0] in call.weights and part[0] not in biases]
            )
            if call.addmm and self.in_sequences:
                self._accumulate(of_input)
        else:
            for name, part in parts:
                self._accumulate_one(name, part)
            self._sum_tied(list(call.parameters), viewed=False)

    def pass_on(self) -> None:
        """fully_shard's node before a nested unit has run its hook; the gradient goes to the block.
        """
        value, self.bound = self.bound, ""
        waiting = self.waiting.pop(_at_unit(value), "")
        if waiting:
            self._accumulate([(value, waiting)])

    def _accumulate(self, parts: list[GradientPart]) -> None:
        for name, part in parts:
            self._accumulate_one(name, part)
        self._end_node()

    def _accumulate_one(self, value: str, part: str) -> None:
        """The engine's input buffer adds a second gradient into the first, if nothing else holds
        that one and it is no view.

        Not on the CPU, where a dispatch-level meter watches: autograd adds out of place under any
        dispatch mode. torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        node = _at_unit(value) if value == self.bound else value
        if node not in self.waiting:
            self.waiting[node] = part
            return
        first = self.waiting[node]
        if self.in_place and first not in self.of_linears and self.storages.references[first] == 1:
            self.added.append(part)
        else:
            self.waiting[node] = self.new(value, "summed")
            if first in self.turned:
                self.turned.add(self.waiting[node])
            self.storages.release(first)
            self.added.append(part)

    def _sum_tied(self, names: list[str], *, viewed: bool = True) -> None:
        """Sum as `_sum_one` does, for all parameters whose gradients one node has made; for a
        linear they are views of what it made."""
        start = len(self.storages.events)
        for name in names:
            self._sum_one(name, viewed=viewed)
        made = [
            event for event in self.storages.events[start:] if isinstance(event, ParameterGradient)
        ]
        for event in made[:-1]:
            self.storages.events[self.storages.events.index(event, start)] = replace(
                event, node_makes_more=True
            )
        self._end_node()

    def _sum_one(self, name: str, *, viewed: bool) -> None:
        """The next gradient of a parameter with several uses is added to the sum of those before;
        the last makes the parameter's.

        In place as `_accumulate_one` does, but not into a `viewed` gradient: that of a linear is a
        view of what was made.
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
                parts.append(self.new(name))
            if not in_place:
                self.storages.release(older)
        self.added.append(newer)

    def _end_node(self) -> None:
        """A node of autograd is over: what it made and the engine added to something else goes."""
        for name in self.added:
            self.storages.release(name)
        self.added.clear()
