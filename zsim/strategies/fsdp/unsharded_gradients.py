"""Unsharded gradients as backward makes them: born, or added to older ones, in the order of
autograd's engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from zsim.autograd.lowered import (
    Accumulated,
    LoweredModule,
    ParameterGradient,
    TapeEvent,
)
from zsim.ir.buffers import Buffer, form_of, unsharded_gradient_of
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.strategies.building.backward_events import Backwards, InTurn
from zsim.strategies.building.step_builder import alloc_of, free_of


@dataclass(slots=True, kw_only=True)
class UnshardedGradients:
    """The unsharded gradients of one rank, "<fqn>.unsharded_gradient" each; `nbytes` of each whole
    parameter, by fqn."""

    nbytes: dict[str, int]
    backwards: Backwards[InTurn]
    uses_left: Counter[str] = field(default_factory=Counter)
    """Gradients of each parameter still to come in this backward: a tied one has several, summed
    before they are kept."""
    tied_parts: dict[str, list[Buffer]] = field(default_factory=dict)
    born: set[str] = field(default_factory=set)
    """Parameters whose gradient this backward has made anew, rather than found from an earlier
    micro-batch."""
    of_views: bool = False
    """Parameters are views (FSDP1). A view's own backward runs last, and copies a gradient that has
    another layout. A gradient that a sum has expanded it flattens without a copy."""
    element: int = 0
    """Bytes of one element, where parameters are views."""
    scalars: set[Buffer] = field(default_factory=set)
    """Buffers of one element that this backward makes."""
    uncopied: dict[str, Buffer] = field(default_factory=dict)
    """Buffer of the gradient that a view will copy, by view."""
    added: list[str] = field(default_factory=list)
    """Gradients that the module at hand has added to an earlier one, in its order."""

    def begin(self, modules: tuple[LoweredModule, ...]) -> None:
        """A backward over `modules` begins: count the gradients that it will make of each
        parameter."""
        self.uses_left = Counter(
            [
                event.fqn
                for module in modules
                for event in module.backward.memory
                if type(event) is ParameterGradient
            ]
        )
        self.born = set()
        self.scalars = {
            event.buffer
            for module in modules if self.of_views
            for event in module.backward.memory
            if type(event) is Alloc and event.nbytes == self.element
        }

    def events(
        self, module: LoweredModule, tape: Sequence[TapeEvent], live: set[Buffer]
    ) -> InTurn:
        """A module's backward, of which `tape` is done here, as `recomputed_in_turn` splits it;
        `live` are the rank's live buffers, and learns of gradients that are born.

        A gradient that finds an older one is added to it when it is accumulated; `added` names
        those.
        """
        self.added = []
        tape = tuple(self._left_to_views(tape)) if self.of_views else tape
        return self.backwards.of(module, tape, lambda event: self._born(event, live))

    def _left_to_views(self, tape: Iterable[TapeEvent]) -> Iterator[TapeEvent]:
        """The tape without the copies of gradients that lie otherwise than their parameters, and
        without the frees of what is copied.

        Parameters that are summed together have one gradient, freed after the last of them.
        """
        copies, last = list[ParameterGradient](), None
        for event in tape:
            if type(event) is ParameterGradient and event.is_copy:
                copies.append(event)
            elif not copies:
                yield event
            elif last is copies[-1] and type(event) is Free:
                shared = copies if event.buffer in self.scalars else copies[-1:]
                yield from copies[: -len(shared)]  # what is copied is somebody else's too
                self.uncopied |= dict.fromkeys([copy.fqn for copy in shared], event.buffer)
                copies = []
            else:
                if not isinstance(event, Accumulated):
                    yield from copies
                    copies = []
                yield event
            last = event
        yield from copies

    def copied(
        self, views: Iterable[str], live: set[Buffer]
    ) -> tuple[list[MemoryEvent], frozenset[Buffer]]:
        """The backward of `views`, in the order of autograd: what lies otherwise is copied. And the
        gradients that have no memory, since they share another's one element."""
        memory, sharing, flattened = list[MemoryEvent](), set[Buffer](), set[Buffer]()
        for fqn in views:
            if fqn not in self.uncopied:
                continue
            source, name = self.uncopied.pop(fqn), unsharded_gradient_of(fqn)
            if source in flattened:
                sharing.add(name)
                continue
            live.add(name)
            if source in self.scalars:
                memory += [Free(source), Alloc(name, "unsharded_gradients", self.element)]
                flattened.add(source)
            else:
                memory += [Alloc(name, "unsharded_gradients", self.nbytes[fqn]), Free(source)]
        return memory, frozenset(sharing)

    def _born(self, event: ParameterGradient, live: set[Buffer]) -> tuple[list[Alloc], list[Free]]:
        fqn = event.fqn
        name, nbytes = unsharded_gradient_of(fqn), self.nbytes[fqn]
        self.uses_left[fqn] -= 1
        if name not in live:
            self.born.add(fqn)
            live.add(name)
            return [alloc_of(name, "unsharded_gradients", nbytes)], []
        if event.is_copy:
            self.added.append(fqn)
            return [], []
        part = form_of(name, "added", self.uses_left[fqn])
        parts = [*self.tied_parts.pop(fqn, []), part]
        if fqn not in self.born:
            if self.uses_left[fqn]:
                self.tied_parts[fqn], parts = parts, []
            else:
                self.added.append(fqn)
        return [alloc_of(part, "temporaries", nbytes)], [free_of(name) for name in parts]
