"""Unsharded gradients as backward makes them: born, or added to older ones, in the order of autograd's engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from zsim.ops import Alloc, Free, MemoryEvent
from zsim.training import LoweredModule, ParameterGradient, Recomputed, TapeEvent


@dataclass(slots=True, kw_only=True)
class Gradients:
    """The unsharded gradients of one rank, "<fqn>.unsharded_gradient" each; `nbytes` of each whole parameter, by fqn."""

    nbytes: dict[str, int]
    uses_left: Counter[str] = field(default_factory=Counter)
    """Gradients of each parameter still to come in this backward: a tied one has several, summed before they are kept."""
    tied_parts: dict[str, list[str]] = field(default_factory=dict)
    born: set[str] = field(default_factory=set)
    """Parameters whose gradient this backward has made anew, rather than found from an earlier micro-batch."""

    def begin(self, modules: tuple[LoweredModule, ...]) -> None:
        """A backward over `modules` begins: count the gradients that it will make of each parameter."""
        self.uses_left = Counter(
            [event.fqn for module in modules for event in module.backward.memory if type(event) is ParameterGradient]
        )
        self.born = set()

    def events(self, tape: Iterable[TapeEvent], live: set[str]) -> list[MemoryEvent | Recomputed]:
        """A module's backward; `live` are the rank's live buffers, and learns of gradients that are born.

        A gradient that finds an older one is added to it when the node that made it has let go of what it held.
        """
        found: list[MemoryEvent | Recomputed] = []
        added: list[str] = []
        node_over = False
        for event in tape:
            if added:
                freed = isinstance(event, Free)
                if node_over and not freed:
                    found += [Free(name) for name in added]
                    added, node_over = [], False
                node_over = node_over or freed
            if type(event) is not ParameterGradient:
                found.append(event)
                continue
            name, nbytes = f"{event.fqn}.unsharded_gradient", self.nbytes[event.fqn]
            self.uses_left[event.fqn] -= 1
            if name not in live:
                self.born.add(event.fqn)
                live.add(name)
                found.append(Alloc(name, "unsharded_gradients", nbytes))
                continue
            found.append(Alloc(part := f"{name}.added{self.uses_left[event.fqn]}", "temporaries", nbytes))
            waiting = self.tied_parts.pop(event.fqn, [])
            if self.uses_left[event.fqn] and event.fqn not in self.born:
                self.tied_parts[event.fqn] = [*waiting, part]
            else:
                added += [*waiting, part]
        found += [Free(name) for name in added]
        return found
